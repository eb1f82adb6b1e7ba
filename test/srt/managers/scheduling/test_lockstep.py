"""Several ranks of one replica, turned by hand: the same on all of them, and one reply for all."""

from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from fixtures.control import IN_PLACE, Harness, updating

from ebbtide.srt.errors import EngineError, RequestRejected
from ebbtide.srt.managers.control import OutOfStep
from ebbtide.srt.managers.control.weights import How, WritePlan
from ebbtide.srt.managers.io_struct import (
    PING_TIMEOUT_S,
    AnyControlRequest,
    Canary,
    ContinueGenerationReqInput,
    ControlCall,
    DestroyWeightsUpdateGroupReqInput,
    EndWeightUpdateReqInput,
    GetLoadReqInput,
    GetWeightsByNameReqInput,
    InitWeightsUpdateGroupReqInput,
    PauseGenerationReqInput,
    PauseMode,
    PingReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    SchedulerInput,
    Tick,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromTensorReqInput,
    WeightUpdateRequest,
)
from ebbtide.srt.managers.scheduling import lockstep
from ebbtide.srt.managers.scheduling.lockstep import Demand, LeaderInbox
from ebbtide.srt.memory_saver import MemoryTag
from ebbtide.srt.slices import Slices
from ebbtide.testing import NullDevice, NullWeights, default_schedule

NUM_RANKS = 3
KV_CACHE = (MemoryTag.KV_CACHE,)
GRAPHS = (MemoryTag.CUDA_GRAPH,)


@pytest.fixture
def harness(overlap: None) -> Harness:
    return Harness(num_ranks=NUM_RANKS)


def update(value: int, *layers: int, **fields: Any) -> UpdateWeightFromDiskReqInput:
    return updating(value, *layers, weight_version=value, **fields)


def assert_serve(harness: Harness, *values: int, version: str) -> None:
    """All ranks, under this version."""
    assert harness.values == list(values)
    assert {rank.scheduler.control.updates.version for rank in harness.ranks} == {version}


def used_bytes(harness: Harness) -> list[int]:
    return [rank.device.used_bytes for rank in harness.ranks]


def turn_all_but(harness: Harness, slow: int, *, count: int) -> None:
    """Every rank turns so often, but for one."""
    for _ in range(count):
        for index in range(NUM_RANKS):
            if index != slow:
                harness.turn_rank(index)


def test_the_state_has_the_memory_of_every_rank_before_the_reply_is_there(harness: Harness) -> None:
    assert harness.release(*KV_CACHE).freed_bytes == {MemoryTag.KV_CACHE: NUM_RANKS * 5000}
    assert [rank.tp_rank for rank in harness.now.ranks] == list(range(NUM_RANKS))
    assert {rank.tags[MemoryTag.KV_CACHE].resident_bytes for rank in harness.now.ranks} == {0}


class Ticks:
    """A follower's end, of which what is sent is kept."""

    def __init__(self) -> None:
        self.sent: list[Tick] = []

    def send(self, message: Tick) -> None:
        self.sent.append(message)


class Messages:
    """What the leader finds when it looks."""

    def __init__(self, *messages: SchedulerInput) -> None:
        self._messages = list(messages)

    def receive(self, timeout_s: float | None) -> list[SchedulerInput]:
        messages, self._messages = self._messages, []
        return messages


@pytest.mark.parametrize(
    ("entries", "shares"),
    [
        # For the ranks of one replica, for those of two, one for everybody, and too many.
        ([b"0", b"1", b"2"], [[b"", b"1", b""], [b"", b"", b"2"]]),
        (
            [b"", b"", b"", b"3", b"4", b"5"],
            [[b"", b"", b"", b"", b"4", b""], [b"", b"", b"", b"", b"", b"5"]],
        ),
        ([b"all"], [[b"all"], [b"all"]]),
        ([b"0", b"1", b"2", b"3"], [[b"0", b"1", b"2", b"3"]] * 2),
    ],
)
def test_a_follower_is_sent_its_own_entry_of_a_payload(
    entries: list[bytes], shares: list[list[bytes]]
) -> None:
    payload = UpdateWeightsFromTensorReqInput(serialized_named_tensors=entries)
    calls = [ControlCall(id="1", request=payload), ControlCall(id="2", request=PingReqInput())]
    followers = [Ticks(), Ticks()]
    manager: Any = None  # Nothing is answered yet.
    inbox = LeaderInbox(Messages(*calls), manager, followers, dp_rank=1)
    assert inbox.receive(Demand.NOTHING) == calls
    for follower, share in zip(followers, shares, strict=True):
        [tick] = follower.sent
        dealt, same = tick.messages
        assert (dealt.id, dealt.request.serialized_named_tensors) == ("1", share)  # type: ignore[union-attr]
        assert same == calls[1]


def test_an_idle_leader_sends_no_ticks(harness: Harness) -> None:
    harness.do(PingReqInput())
    num_turns = harness.num_turns(0)
    harness.turn(20)
    assert harness.num_turns(0) == num_turns


def test_a_penalty_needs_the_last_token_on_every_rank() -> None:
    harness = Harness(num_ranks=2, schedule=default_schedule(overlap=True))
    rid = harness.generate(range(1, 6), max_new_tokens=10, frequency_penalty=0.5)
    harness.assert_end(rid, length=10)
    assert len({rank.runner.num_steps for rank in harness.ranks}) == 1


class TestUpdates:
    def test_all_ranks_commit_between_the_same_two_passes(self, harness: Harness) -> None:
        for index, slowness in enumerate((0, 3, 9)):
            harness.ranks[index].weights.slowness = slowness
        rid = harness.begin_request(max_new_tokens=100)
        num_tokens = harness.num_tokens(rid)
        reply = harness.do(update(7, **IN_PLACE))
        assert (reply.weight_version, reply.staged, reply.num_tensors) == ("7", True, 4)
        assert harness.num_tokens(rid) > num_tokens + 4 * 9, "passes go on while the slowest one copies"
        harness.run_until_idle()
        assert_serve(harness, 7, 7, 7, 7, version="7")
        assert harness.versions(rid) == ["default", "7"]
        assert len({rank.runner.num_steps for rank in harness.ranks}) == 1

    def test_the_reply_comes_before_the_leader_unmaps_what_was_read(
        self, harness: Harness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        answered = []
        weights = harness.ranks[0].weights
        open_update = weights.open

        def unmap() -> Slices[None]:
            answered.append(call in harness.replies)
            yield 1

        def watched(request: WeightUpdateRequest) -> Slices[WritePlan]:
            plan = yield from open_update(request)
            monkeypatch.setattr(plan, "detach", unmap)
            return plan

        monkeypatch.setattr(weights, "open", watched)
        call = harness.call(update(7))
        while not answered:
            # It is faster than the others.
            for _ in range(3):
                harness.turn_rank(0)
            harness.turn()
        assert answered[0]

    def test_it_goes_on_while_somebody_asks_in_every_turn_how_much_there_is_to_do(
        self, harness: Harness
    ) -> None:
        call = harness.call(update(7))
        asked = []
        while call not in harness.replies:
            asked.append(harness.call(GetLoadReqInput()))
            harness.turn()
            assert len(asked) < 100, "the leader awaits the others' replies, and does nothing"
        harness.turn()
        assert harness.replies.keys() >= {*asked}

    @pytest.mark.parametrize("in_session", [False, True])
    @pytest.mark.parametrize("step", ["open", "stage", "arrive", "map", "write", "complete", "release"])
    def test_one_rank_that_fails_fails_all_and_is_named(
        self, harness: Harness, step: str, in_session: bool
    ) -> None:
        if in_session:
            harness.begin()
        harness.ranks[1].weights.faults[step] = RequestRejected("cannot be done here")
        request = update(7, 0, 1, 2, is_sent=step == "arrive")
        if in_session and step == "complete":
            harness.do(request)
            refusal = harness.refuse(EndWeightUpdateReqInput(weight_version="7"))
        else:
            refusal = harness.refuse(request)
        assert (refusal.status, refusal.message) == (400, "rank 1: cannot be done here")
        assert_serve(harness, 0, 0, 0, 0, version="default")
        harness.do(request)
        if in_session:
            # What one rank cannot open is not known by name.
            harness.end(weight_version="7", allow_incomplete=step == "open")
        assert_serve(harness, 7, 7, 7, 0, version="7")

    def test_a_failure_of_ours_on_one_rank_leaves_the_old_weights(self, harness: Harness) -> None:
        harness.ranks[2].weights.faults["write"] = EngineError("a broken cable")
        refusal = harness.refuse(update(7))
        assert refusal.status == 400
        assert "the old weights serve" in refusal.message
        assert "rank 2: EngineError: a broken cable" in refusal.message
        assert_serve(harness, 0, 0, 0, 0, version="default")

    def test_one_rank_without_room_for_a_copy_has_all_write_in_place(self, harness: Harness) -> None:
        harness.ranks[1].weights.num_staged = 0
        reply = harness.do(update(7, 0))
        assert (reply.staged, reply.content) == (False, "valid")
        assert harness.values == [7, 0, 0, 0]

    def test_what_is_committed_stays_so_where_one_rank_cannot_let_go_of_what_it_read(
        self, harness: Harness
    ) -> None:
        harness.ranks[1].weights.num_staged = 0
        harness.ranks[1].weights.faults["release"] = OSError("a broken block of shared memory")
        assert harness.do(update(7, 0)).committed
        harness.run_until_idle()
        harness.do(update(8))

    def test_broken_off_in_place_the_names_are_stale_on_every_rank(self, harness: Harness) -> None:
        harness.ranks[1].weights.num_staged = 0
        harness.ranks[2].weights.faults["write"] = EngineError("half-way")
        refusal = harness.refuse(update(7, 0, 3))
        assert (refusal.status, "rank 2: EngineError: half-way" in refusal.message) == (500, True)
        assert "2 parameters are stale until an update writes them" in refusal.message
        missing = [rank.scheduler.control.memory.content.missing for rank in harness.ranks]
        assert missing == [{"layer.0", "layer.3"}] * NUM_RANKS
        rid = harness.begin_request(max_new_tokens=16)
        assert harness.outputs[rid].token_ids == []
        harness.do(update(8))
        harness.assert_end(rid, length=16)

    def test_tensors_arrive_when_they_do_and_nobody_waits_for_the_dead(self, harness: Harness) -> None:
        harness.ranks[0].weights.lateness = 10_000
        harness.ranks[1].weights.faults["arrive"] = RequestRejected("its sender has gone")
        call = harness.settle(harness.call(update(7, is_sent=True)))
        assert harness.refusal(call).message == "rank 1: its sender has gone"
        harness.ranks[0].weights.lateness, harness.ranks[2].weights.slowness = 3, 11
        assert harness.reply(harness.settle(harness.call(update(8, is_sent=True)))).success
        assert harness.values == [8] * 4

    @pytest.mark.parametrize(
        ("other", "fields"),
        [
            (update(7, 0), {}),
            (update(7, needs_copy=True), {}),
            # As files of a node may be of another version than those of the others.
            (update(7), {"base_version": "6"}),
            (update(7), {"incomplete": "its scales are missing"}),
        ],
    )
    def test_ranks_that_were_given_other_tensors_refuse(
        self,
        harness: Harness,
        monkeypatch: pytest.MonkeyPatch,
        other: UpdateWeightFromDiskReqInput,
        fields: dict[str, str],
    ) -> None:
        weights = harness.ranks[1].weights
        open_update = weights.open

        def open_other(request: WeightUpdateRequest) -> Slices[WritePlan]:
            plan = yield from open_update(other)
            for name, value in fields.items():
                monkeypatch.setattr(plan, name, value)
            return plan

        with monkeypatch.context() as patch:
            patch.setattr(weights, "open", open_other)
            refusal = harness.refuse(update(7))
        assert "every rank must be given the same tensors" in refusal.message
        assert all(value in refusal.message for value in fields.values())
        assert harness.values == [0] * 4
        harness.do(update(8))

    def test_a_delta_whose_sums_are_wrong_on_one_rank_is_refused_on_all(
        self, harness: Harness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def check_sums(index: int) -> None:
            if index == 1:
                raise RequestRejected("other sums")

        def open_delta(index: int, request: WeightUpdateRequest) -> Slices[WritePlan]:
            plan = yield from NullWeights.open(harness.ranks[index].weights, request)
            plan.how = How.PATCH
            plan.patch = Mock(**{"sum_up.side_effect": lambda staging: (yield 1), "sums.return_value": {}})
            plan.patch.check_sums.side_effect = lambda shares: check_sums(index)
            return plan

        with monkeypatch.context() as patch:
            for index, rank in enumerate(harness.ranks):
                patch.setattr(rank.weights, "open", partial(open_delta, index))
            assert harness.refuse(update(7)).message == "rank 1: other sums"
        assert harness.values == [0] * 4
        harness.do(update(8))

    def test_a_commit_that_fails_on_one_rank_ends_it(self, harness: Harness) -> None:
        """It would serve other weights than the others do."""
        harness.ranks[1].weights.faults["commit"] = EngineError("no swap")
        harness.call(update(7))
        with pytest.raises(OutOfStep, match="no swap"):
            harness.turn(50)

    @pytest.mark.parametrize("index", [0, 1])
    def test_a_rank_that_gives_up_by_itself_ends_the_replica(
        self, harness: Harness, monkeypatch: pytest.MonkeyPatch, index: int
    ) -> None:
        """The others would wait for its votes, in this update and in whatever comes next."""
        weights = harness.ranks[index].weights
        open_update = weights.open

        def broken(request: WeightUpdateRequest) -> Slices[WritePlan]:
            plan = yield from open_update(request)
            monkeypatch.setattr(plan, "begin", lambda staging: 1 / 0)
            return plan

        monkeypatch.setattr(weights, "open", broken)
        harness.call(update(7))
        with pytest.raises(OutOfStep, match="given up"):
            harness.turn(50)

    def test_a_rank_that_alone_does_not_commit_ends_the_replica(
        self, harness: Harness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Behind the last vote nobody else would hear of it."""
        conditions = harness.ranks[1].scheduler.control.updates._conditions
        monkeypatch.setattr(conditions, "ready", lambda terms: 1 / 0)
        harness.call(update(7, pause_mode=PauseMode.IN_PLACE, flush_cache=False))
        with pytest.raises(OutOfStep, match="given up"):
            harness.turn(50)

    def test_a_rank_that_does_not_get_its_memory_back_ends(
        self, harness: Harness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its pages would be others than those of the other ranks."""
        harness.ranks[1].weights.faults["write"] = RequestRejected("cannot be done here")
        monkeypatch.setattr(harness.ranks[1].chunks, "take_back", lambda chunks: 1 / 0)
        harness.call(update(7))
        with pytest.raises(OutOfStep, match="division by zero"):
            harness.turn(50)

    def test_a_rank_that_fails_in_the_middle_of_a_trial_pass_ends(
        self, harness: Harness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The others wait for it there."""
        monkeypatch.setattr(harness.ranks[1].runner, "launch", lambda plan, **fields: 1 / 0)
        harness.call(update(7, canary=Canary(input_ids=[5, 6])))
        with pytest.raises(OutOfStep, match="division by zero"):
            harness.turn(50)

    def test_what_one_rank_cannot_read_is_joined_on_none(
        self, harness: Harness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The others would wait for its part."""
        joined = []
        read = GetWeightsByNameReqInput(name="layer.1")
        with monkeypatch.context() as patch:
            patch.setattr(harness.weights, "read", lambda name, max_rows: lambda: joined.append(name))
            patch.setattr(harness.ranks[1].weights, "read", lambda name, max_rows: 1 / 0)
            assert "rank 1: ZeroDivisionError" in harness.refuse(read).message
        assert joined == []
        assert harness.do(read).values == [0.0]

    def test_a_deadline_reaches_all_ranks_at_the_same_place(self, harness: Harness) -> None:
        harness.ranks[2].weights.slowness = 10_000
        call = harness.call(update(7))
        harness.turn(20)
        assert call not in harness.replies
        harness.expire(call)
        harness.turn_until(lambda: call in harness.replies)
        assert harness.refusal(call)
        assert harness.values == [0] * 4
        harness.ranks[2].weights.slowness = 0
        harness.do(update(8))


class TestMemory:
    def test_one_rank_without_memory_and_none_resumes(self, harness: Harness) -> None:
        harness.release()
        harness.ranks[2].device.take(9000)
        refusal = harness.refuse(ResumeMemoryOccupationReqInput())
        assert refusal.status == 409
        assert refusal.message.startswith("rank 2: not enough device memory")
        assert refusal.fields["free_bytes"] == 1000
        assert used_bytes(harness) == [0, 0, 9000]
        harness.ranks[2].device.used_bytes -= 9000
        assert harness.resume().mapped_bytes[MemoryTag.KV_CACHE] == NUM_RANKS * 5000

    @pytest.mark.parametrize("gets_it", [True, False])
    def test_one_rank_that_is_slow_to_get_the_rest_of_its_cache_holds_no_pass_up(
        self, harness: Harness, monkeypatch: pytest.MonkeyPatch, gets_it: bool
    ) -> None:
        rid = harness.begin_request(max_new_tokens=100)
        harness.release(*KV_CACHE)
        call = harness.call(ResumeMemoryOccupationReqInput(tags=KV_CACHE))
        chunks, add = harness.ranks[2].chunks, harness.ranks[2].chunks.add
        monkeypatch.setattr(chunks, "add", lambda those: add(those) if gets_it else 1 / 0)
        turn_all_but(harness, 2, count=20)
        assert call not in harness.replies
        harness.turn_until(lambda: call in harness.replies)
        assert harness.replies[call].success == gets_it
        assert used_bytes(harness) == [7100 if gets_it else 2100] * NUM_RANKS
        monkeypatch.undo()
        harness.resume()
        harness.assert_end(rid, length=100)
        assert used_bytes(harness) == [7100] * NUM_RANKS

    def test_calls_behind_a_resume_wait_for_it_in_their_order(self, harness: Harness) -> None:
        harness.release()
        requests = [
            ResumeMemoryOccupationReqInput(),
            ReleaseMemoryOccupationReqInput(tags=KV_CACHE),
            ResumeMemoryOccupationReqInput(tags=KV_CACHE),
            PingReqInput(),
        ]
        calls = [harness.call(request) for request in requests]
        harness.turn()
        assert not set(calls) & set(harness.replies)
        harness.run_until_idle()
        assert [harness.reply(call).success for call in calls] == [True] * 4
        # The release comes as soon as the first part of the cache is there, and ends what was to follow it.
        resumed, released, again = (harness.reply(call) for call in calls[:3])
        assert released.freed_bytes == {MemoryTag.KV_CACHE: resumed.mapped_bytes[MemoryTag.KV_CACHE]}
        assert again.mapped_bytes == {MemoryTag.KV_CACHE: NUM_RANKS * 5000}
        assert used_bytes(harness) == [7100] * NUM_RANKS

    def test_no_pass_runs_while_ranks_resume(self, harness: Harness) -> None:
        """One rank would run it with graphs, another without."""
        rid = harness.begin_request(max_new_tokens=100)
        # The next pass that lacks them has all ranks resume them.
        harness.call(ReleaseMemoryOccupationReqInput(tags=GRAPHS))
        turn_all_but(harness, 2, count=5)
        num_tokens = harness.num_tokens(rid)
        turn_all_but(harness, 2, count=20)
        assert harness.num_tokens(rid) == num_tokens
        harness.assert_end(rid, length=100)
        assert used_bytes(harness) == [7100] * NUM_RANKS

    def test_graphs_come_back_on_all_ranks_or_on_none(
        self, harness: Harness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(lockstep, "PROPOSAL_INTERVAL_S", 0.0)
        harness.release(*GRAPHS)
        harness.ranks[1].device.take(3000)
        rid = harness.begin_request(max_new_tokens=100, num_turns=20)
        harness.turn_until(lambda: not harness.scheduler.control.operations.stands_alone)
        assert used_bytes(harness) == [7000, 10_000, 7000]
        harness.ranks[1].device.used_bytes -= 3000
        harness.assert_end(rid, length=100)
        assert used_bytes(harness) == [7100] * NUM_RANKS

    def test_a_release_saves_on_every_rank_before_one_gives_anything_back(self, overlap: None) -> None:
        harness = Harness(num_ranks=2, keeps_weights=True, device=NullDevice(10_000))
        call = harness.call(ReleaseMemoryOccupationReqInput(tags=(MemoryTag.WEIGHTS,)))
        harness.turn_rank(0)
        assert harness.device.used_bytes == 7100, "the other rank has not said yet that it could save them"
        harness.turn_until(lambda: call in harness.replies)
        assert used_bytes(harness) == [5100, 5100]
        harness.resume()
        assert harness.values == [0] * 4


class TestGroups:
    INIT = InitWeightsUpdateGroupReqInput(master_address="a", master_port=1, rank_offset=1, world_size=4)

    def groups(self, harness: Harness) -> list[list[str]]:
        return [rank.weights.group_names() for rank in harness.ranks]

    def test_all_ranks_join_and_leave(self, harness: Harness) -> None:
        harness.ranks[1].weights.slowness = 5
        for is_there in (False, True):
            assert harness.reply(harness.settle(harness.call(self.INIT))).replaced is is_there
            assert self.groups(harness) == [["weight_update_group"]] * NUM_RANKS
        assert harness.do(DestroyWeightsUpdateGroupReqInput()).changed
        assert self.groups(harness) == [[]] * NUM_RANKS
        assert not harness.do(DestroyWeightsUpdateGroupReqInput()).changed

    def test_one_that_cannot_join_has_the_others_leave(self, harness: Harness) -> None:
        harness.ranks[2].weights.faults["join"] = RequestRejected("nobody is there")
        assert harness.refuse(self.INIT).message == "rank 2: nobody is there"
        assert self.groups(harness) == [[]] * NUM_RANKS


class TestSlowRanks:
    """A rank that does not turn at all while the others do."""

    @pytest.mark.parametrize(
        ("request_", "limit_s"),
        [
            (update(7, timeout_s=0.0), 0.0),
            # What the first rank has done at once.
            (PauseGenerationReqInput(mode=PauseMode.WAIT, timeout_s=PING_TIMEOUT_S), PING_TIMEOUT_S),
            (PingReqInput(), PING_TIMEOUT_S),
        ],
    )
    def test_it_holds_up_a_reply_until_the_limit_and_is_named(
        self, request_: AnyControlRequest, limit_s: float, harness: Harness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock = SimpleNamespace(monotonic=lambda: 0.0)
        monkeypatch.setattr(lockstep, "time", clock)
        call = harness.call(request_)
        turn_all_but(harness, 1, count=20)
        assert call not in harness.replies
        clock.monotonic = lambda: limit_s + lockstep.ANSWER_GRACE_S
        turn_all_but(harness, 1, count=1)
        refusal = harness.refusal(call)
        assert refusal.status == 500
        assert refusal.message.startswith("rank 1: no answer within")
        # It catches up: its late reply goes nowhere, and the replica goes on as one.
        assert harness.do(ContinueGenerationReqInput()).success
        harness.do(update(8))
        assert_serve(harness, 8, 8, 8, 8, version="8")

    def test_it_decides_nothing_by_being_late(self, harness: Harness) -> None:
        harness.pause(PauseMode.IN_PLACE)
        rids = [harness.generate(range(1, 12), seed=seed) for seed in range(3)]
        call = harness.call(ContinueGenerationReqInput())
        turn_all_but(harness, 2, count=50)
        assert all(harness.outputs[rid].finish for rid in rids)
        assert call not in harness.replies, "acknowledged is what holds on every rank"
        harness.turn_until(lambda: call in harness.replies)
        assert harness.reply(call).changed
        harness.run_until_idle()
        assert len({rank.runner.num_steps for rank in harness.ranks}) == 1
