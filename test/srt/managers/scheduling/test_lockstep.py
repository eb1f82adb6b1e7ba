"""Several ranks of one replica, turned by hand: the same on all of them, and one reply for all."""

from __future__ import annotations

import time
from typing import Any

import pytest

from ebbtide.srt.errors import EngineError, RequestRejected
from ebbtide.srt.managers.control.ports import OutOfStep
from ebbtide.srt.managers.io_struct import (
    AnyControlRequest,
    AnyReply,
    BeginWeightUpdateReqInput,
    ContinueGenerationReqInput,
    ContinueGenerationReqOutput,
    ControlCall,
    DestroyWeightsUpdateGroupReqInput,
    EndWeightUpdateReqInput,
    Expire,
    InitWeightsUpdateGroupReqInput,
    PauseGenerationReqInput,
    PauseGenerationReqOutput,
    PauseMode,
    PingReqInput,
    PingReqOutput,
    Refusal,
    ReleaseMemoryOccupationReqInput,
    ReleaseMemoryOccupationReqOutput,
    ResumeMemoryOccupationReqInput,
    ResumeMemoryOccupationReqOutput,
    SchedulerInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromTensorReqInput,
    UpdateWeightsReqOutput,
    WeightSessionReqOutput,
    WeightsUpdateGroupReqOutput,
)
from ebbtide.srt.managers.scheduling import lockstep
from ebbtide.srt.managers.scheduling.lockstep import Demand, LeaderInbox
from ebbtide.srt.managers.scheduling.rank_messages import Tick
from ebbtide.srt.memory_saver.tags import MemoryTag
from ebbtide.testing import NullDevice, SchedulerHarness, default_schedule

NUM_RANKS = 3
GRAPHS = (MemoryTag.CUDA_GRAPH,)


@pytest.fixture
def harness(overlap: None) -> SchedulerHarness:
    return SchedulerHarness(num_ranks=NUM_RANKS)


def update(value: int, **fields: Any) -> UpdateWeightFromDiskReqInput:
    return UpdateWeightFromDiskReqInput(model_path=str(value), weight_version=value, **fields)


def contents(harness: SchedulerHarness) -> list[set[int | None]]:
    return [set(rank.weights.live.values()) for rank in harness.ranks]


def versions(harness: SchedulerHarness) -> list[str]:
    return [rank.scheduler.control.updates.version for rank in harness.ranks]


def turn_all_but(harness: SchedulerHarness, slow: int, *, count: int) -> None:
    """Every rank turns so often, but for one."""
    for _ in range(count):
        for index in range(NUM_RANKS):
            if index != slow:
                harness.turn_rank(index)


def answered(harness: SchedulerHarness, request: AnyControlRequest) -> AnyReply:
    """The reply to a request that waits for what sends the loop no message: here, every turn looks."""
    call = harness.call(request)
    harness.turn(200)
    return harness.replies[call]


def start_stream(harness: SchedulerHarness) -> str:
    """A request that still runs after a hundred turns."""
    rid = harness.generate(range(1, 9), max_new_tokens=110)
    harness.turn(3)
    return rid


def test_every_rank_makes_the_same_passes_and_one_speaks(harness: SchedulerHarness) -> None:
    rids = [harness.generate(range(1, 20 + seed), seed=seed) for seed in range(12)]
    harness.run_until_idle()
    assert all(len(harness.outputs[rid].token_ids) == 16 for rid in rids)
    assert len({rank.runner.num_steps for rank in harness.ranks}) == 1
    assert harness.runner.num_steps > 0
    assert {rank.scheduler.policy.allocator.num_free for rank in harness.ranks} == {
        harness.scheduler.policy.allocator.num_free
    }


def test_the_state_has_the_memory_of_every_rank_before_the_reply_is_there(harness: SchedulerHarness) -> None:
    reply = harness.apply(
        ReleaseMemoryOccupationReqInput(tags=(MemoryTag.KV_CACHE,)), ReleaseMemoryOccupationReqOutput
    )
    assert reply.freed_bytes == {MemoryTag.KV_CACHE: NUM_RANKS * 5000}
    assert harness.state is not None
    assert [rank.tp_rank for rank in harness.state.ranks] == list(range(NUM_RANKS))
    assert {rank.tags[MemoryTag.KV_CACHE].resident_bytes for rank in harness.state.ranks} == {0}


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
    update, ping = UpdateWeightsFromTensorReqInput(serialized_named_tensors=entries), PingReqInput()
    calls = [ControlCall(id="1", request=update), ControlCall(id="2", request=ping)]
    followers = [Ticks(), Ticks()]
    manager: Any = None  # Nothing is answered yet.
    inbox = LeaderInbox(Messages(*calls), manager, followers, dp_rank=1)
    assert inbox.receive(Demand.NOTHING) == calls
    for follower, share in zip(followers, shares, strict=True):
        [tick] = follower.sent
        dealt, same = tick.messages
        assert isinstance(dealt, ControlCall)
        assert (dealt.id, dealt.request.serialized_named_tensors) == ("1", share)  # type: ignore[union-attr]
        assert same == calls[1]


def test_an_idle_leader_sends_no_ticks(harness: SchedulerHarness) -> None:
    harness.apply(PingReqInput(), PingReqOutput)
    num_turns = harness.num_turns(0)
    harness.turn(20)
    assert harness.num_turns(0) == num_turns


class TestUpdates:
    def test_all_ranks_commit_between_the_same_two_passes(self, harness: SchedulerHarness) -> None:
        for index, slowness in enumerate((0, 3, 9)):
            harness.ranks[index].weights.slowness = slowness
        rid = start_stream(harness)
        reply = harness.apply(
            update(7, pause_mode=PauseMode.IN_PLACE, flush_cache=False), UpdateWeightsReqOutput
        )
        assert (reply.weight_version, reply.staged, reply.num_tensors) == ("7", True, 4)
        harness.run_until_idle()
        assert contents(harness) == [{7}] * NUM_RANKS
        assert versions(harness) == ["7"] * NUM_RANKS
        starts = harness.outputs[rid].version_starts
        assert [version for version, _ in starts] == ["default", "7"]
        assert len({rank.runner.num_steps for rank in harness.ranks}) == 1

    def test_passes_go_on_while_a_slow_rank_copies(self, harness: SchedulerHarness) -> None:
        harness.ranks[2].weights.slowness = 8
        rid = start_stream(harness)
        num_tokens = len(harness.outputs[rid].token_ids)
        harness.apply(update(7, pause_mode=PauseMode.IN_PLACE, flush_cache=False), UpdateWeightsReqOutput)
        assert len(harness.outputs[rid].token_ids) > num_tokens + 4 * 8

    @pytest.mark.parametrize("in_session", [False, True])
    @pytest.mark.parametrize("step", ["open", "stage", "arrive", "map", "write", "complete", "release"])
    def test_one_rank_that_fails_fails_all_and_is_named(
        self, harness: SchedulerHarness, step: str, in_session: bool
    ) -> None:
        if in_session:
            harness.apply(BeginWeightUpdateReqInput(), WeightSessionReqOutput)
        harness.ranks[1].weights.faults[step] = RequestRejected("cannot be done here")
        manifest = {"names": ["layer.0", "layer.1", "layer.2"], "is_sent": step == "arrive"}
        request = update(7, manifest=manifest)
        if in_session and step == "complete":
            harness.apply(request, UpdateWeightsReqOutput)
            refusal = harness.refuse(EndWeightUpdateReqInput(weight_version="7"))
        else:
            refusal = harness.refuse(request)
        assert (refusal.status, refusal.message) == (400, "rank 1: cannot be done here")
        assert contents(harness) == [{0}] * NUM_RANKS
        assert versions(harness) == ["default"] * NUM_RANKS
        harness.apply(request, UpdateWeightsReqOutput)
        if in_session:
            # What one rank cannot open is not known by name.
            end = EndWeightUpdateReqInput(weight_version="7", allow_incomplete=step == "open")
            harness.apply(end, UpdateWeightsReqOutput)
        assert contents(harness) == [{0, 7}] * NUM_RANKS
        assert versions(harness) == ["7"] * NUM_RANKS

    def test_what_all_ranks_refuse_is_said_once(self, harness: SchedulerHarness) -> None:
        refusal = harness.refuse(UpdateWeightFromDiskReqInput(model_path="no number"))
        assert refusal.message == "model_path: expected an integer, got 'no number'"

    def test_a_failure_of_ours_on_one_rank_leaves_the_old_weights(self, harness: SchedulerHarness) -> None:
        harness.ranks[2].weights.faults["write"] = EngineError("a broken cable")
        refusal = harness.refuse(update(7))
        assert refusal.status == 400
        assert "the old weights serve" in refusal.message
        assert "rank 2: EngineError: a broken cable" in refusal.message
        assert contents(harness) == [{0}] * NUM_RANKS

    def test_one_rank_without_room_for_a_copy_has_all_write_in_place(self, harness: SchedulerHarness) -> None:
        harness.ranks[1].weights.num_staged = 0
        reply = harness.apply(update(7, manifest={"names": ["layer.0"]}), UpdateWeightsReqOutput)
        assert (reply.staged, reply.content) == (False, "valid")
        assert contents(harness) == [{0, 7}] * NUM_RANKS

    def test_broken_off_in_place_the_names_are_stale_on_every_rank(self, harness: SchedulerHarness) -> None:
        harness.ranks[1].weights.num_staged = 0
        harness.ranks[2].weights.faults["write"] = EngineError("half-way")
        refusal = harness.refuse(update(7, manifest={"names": ["layer.0", "layer.3"]}))
        assert refusal.status == 500
        assert "rank 2: EngineError: half-way" in refusal.message
        missing = [rank.scheduler.control.memory.content.missing for rank in harness.ranks]
        assert missing == [{"layer.0", "layer.3"}] * NUM_RANKS
        rid = harness.generate([1, 2, 3])
        harness.turn(5)
        assert harness.outputs[rid].token_ids == []
        harness.apply(update(8), UpdateWeightsReqOutput)
        harness.run_until_idle()
        assert len(harness.outputs[rid].token_ids) == 16

    def test_tensors_arrive_when_they_do_and_nobody_waits_for_the_dead(
        self, harness: SchedulerHarness
    ) -> None:
        harness.ranks[0].weights.lateness = 10_000
        harness.ranks[1].weights.faults["arrive"] = RequestRejected("its sender has gone")
        refusal = answered(harness, update(7, manifest={"is_sent": True}))
        assert refusal.message == "rank 1: its sender has gone"
        harness.ranks[0].weights.lateness, harness.ranks[2].weights.slowness = 3, 11
        assert answered(harness, update(8, manifest={"is_sent": True})).success
        assert contents(harness) == [{8}] * NUM_RANKS

    def test_ranks_that_were_given_other_tensors_refuse(
        self, harness: SchedulerHarness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        weights = harness.ranks[1].weights
        open_update = weights.open
        fewer = update(7, manifest={"names": ["layer.0"]})
        with monkeypatch.context() as patch:
            patch.setattr(weights, "open", lambda request: open_update(fewer))
            refusal = harness.refuse(update(7))
        assert "every rank must be given the same tensors" in refusal.message
        assert contents(harness) == [{0}] * NUM_RANKS

    def test_a_commit_that_fails_on_one_rank_ends_it(self, harness: SchedulerHarness) -> None:
        """It would serve other weights than the others do."""
        harness.ranks[1].weights.faults["commit"] = EngineError("no swap")
        harness.call(update(7))
        with pytest.raises(OutOfStep, match="no swap"):
            harness.turn(50)

    def test_a_deadline_reaches_all_ranks_at_the_same_place(self, harness: SchedulerHarness) -> None:
        harness.ranks[2].weights.slowness = 10_000
        call = harness.call(update(7))
        harness.turn(20)
        assert call not in harness.replies
        harness.deliver(Expire(id=call))
        harness.turn_until(lambda: call in harness.replies)
        assert isinstance(harness.replies[call], Refusal)
        assert contents(harness) == [{0}] * NUM_RANKS
        harness.ranks[2].weights.slowness = 0
        harness.apply(update(8), UpdateWeightsReqOutput)


class TestMemory:
    def test_one_rank_without_memory_and_none_resumes(self, harness: SchedulerHarness) -> None:
        harness.apply(ReleaseMemoryOccupationReqInput(), ReleaseMemoryOccupationReqOutput)
        harness.ranks[2].device.take(9000)
        refusal = harness.refuse(ResumeMemoryOccupationReqInput())
        assert refusal.status == 409
        assert refusal.message.startswith("rank 2: not enough device memory")
        assert refusal.fields["free_bytes"] == 1000
        assert [rank.device.used_bytes for rank in harness.ranks] == [0, 0, 9000]
        harness.ranks[2].device.used_bytes -= 9000
        reply = harness.apply(ResumeMemoryOccupationReqInput(), ResumeMemoryOccupationReqOutput)
        assert reply.mapped_bytes[MemoryTag.KV_CACHE] == NUM_RANKS * 5000

    def test_calls_behind_a_resume_wait_for_it_in_their_order(self, harness: SchedulerHarness) -> None:
        harness.apply(ReleaseMemoryOccupationReqInput(), ReleaseMemoryOccupationReqOutput)
        requests = [
            ResumeMemoryOccupationReqInput(),
            ReleaseMemoryOccupationReqInput(tags=(MemoryTag.KV_CACHE,)),
            ResumeMemoryOccupationReqInput(tags=(MemoryTag.KV_CACHE,)),
            PingReqInput(),
        ]
        calls = [harness.call(request) for request in requests]
        harness.turn()
        assert not set(calls) & set(harness.replies)
        harness.run_until_idle()
        assert [harness.replies[call].success for call in calls] == [True] * 4
        assert harness.replies[calls[1]].freed_bytes == {MemoryTag.KV_CACHE: NUM_RANKS * 5000}  # type: ignore[union-attr]
        assert [rank.device.used_bytes for rank in harness.ranks] == [7100] * NUM_RANKS

    def test_no_pass_runs_while_ranks_resume(self, harness: SchedulerHarness) -> None:
        """One rank would run it with graphs, another without."""
        rid = start_stream(harness)
        # The next pass that lacks them has all ranks resume them.
        harness.call(ReleaseMemoryOccupationReqInput(tags=GRAPHS))
        turn_all_but(harness, 2, count=5)
        num_tokens = len(harness.outputs[rid].token_ids)
        turn_all_but(harness, 2, count=20)
        assert len(harness.outputs[rid].token_ids) == num_tokens
        harness.run_until_idle()
        assert len(harness.outputs[rid].token_ids) == 110
        assert [rank.device.used_bytes for rank in harness.ranks] == [7100] * NUM_RANKS

    def test_graphs_come_back_on_all_ranks_or_on_none(
        self, harness: SchedulerHarness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(lockstep, "PROPOSAL_INTERVAL_S", 0.0)
        harness.apply(ReleaseMemoryOccupationReqInput(tags=GRAPHS), ReleaseMemoryOccupationReqOutput)
        harness.ranks[1].device.take(3000)
        rid = start_stream(harness)
        harness.turn(20)
        harness.turn_until(lambda: not harness.scheduler.control.operations.stands_alone)
        assert [rank.device.used_bytes for rank in harness.ranks] == [7000, 10_000, 7000]
        harness.ranks[1].device.used_bytes -= 3000
        harness.run_until_idle()
        assert [rank.device.used_bytes for rank in harness.ranks] == [7100] * NUM_RANKS
        assert len(harness.outputs[rid].token_ids) == 110

    def test_a_release_saves_on_every_rank_before_one_gives_anything_back(self, overlap: None) -> None:
        harness = SchedulerHarness(num_ranks=2, keeps_weights=True, device=NullDevice(10_000))
        call = harness.call(ReleaseMemoryOccupationReqInput(tags=(MemoryTag.WEIGHTS,)))
        harness.turn_rank(0)
        assert harness.device.used_bytes == 7100, "the other rank has not said yet that it could save them"
        harness.turn_until(lambda: call in harness.replies)
        assert [rank.device.used_bytes for rank in harness.ranks] == [5100, 5100]
        harness.apply(ResumeMemoryOccupationReqInput(), ResumeMemoryOccupationReqOutput)
        assert contents(harness) == [{0}] * 2


class TestGroups:
    INIT = InitWeightsUpdateGroupReqInput(master_address="a", master_port=1, rank_offset=1, world_size=4)

    def test_all_ranks_join_and_leave(self, harness: SchedulerHarness) -> None:
        harness.ranks[1].weights.slowness = 5
        assert answered(harness, self.INIT).success
        assert [rank.weights.group_names for rank in harness.ranks] == [["weight_update_group"]] * NUM_RANKS
        assert harness.apply(DestroyWeightsUpdateGroupReqInput(), WeightsUpdateGroupReqOutput).changed
        assert [rank.weights.group_names for rank in harness.ranks] == [[]] * NUM_RANKS
        assert not harness.apply(DestroyWeightsUpdateGroupReqInput(), WeightsUpdateGroupReqOutput).changed

    def test_one_that_cannot_join_has_the_others_leave(self, harness: SchedulerHarness) -> None:
        harness.ranks[2].weights.faults["join"] = RequestRejected("nobody is there")
        assert harness.refuse(self.INIT).message == "rank 2: nobody is there"
        assert [rank.weights.group_names for rank in harness.ranks] == [[]] * NUM_RANKS


class TestSlowRanks:
    """A rank that does not turn at all while the others do."""

    def test_it_holds_up_a_reply_until_the_limit_and_is_named(
        self, harness: SchedulerHarness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(lockstep, "ANSWER_GRACE_S", 0.05)
        call = harness.call(update(7, timeout_s=0.0))
        turn_all_but(harness, 1, count=20)
        assert call not in harness.replies
        time.sleep(0.1)
        turn_all_but(harness, 1, count=1)
        reply = harness.replies[call]
        assert isinstance(reply, Refusal)
        assert reply.status == 500
        assert reply.message.startswith("rank 1: no answer within")
        # It catches up: its late reply goes nowhere, and the replica goes on as one.
        harness.apply(update(8), UpdateWeightsReqOutput)
        assert contents(harness) == [{8}] * NUM_RANKS
        assert versions(harness) == ["8"] * NUM_RANKS

    def test_it_decides_nothing_by_being_late(self, harness: SchedulerHarness) -> None:
        harness.apply(PauseGenerationReqInput(mode=PauseMode.IN_PLACE), PauseGenerationReqOutput)
        rids = [harness.generate(range(1, 12), seed=seed) for seed in range(3)]
        call = harness.call(ContinueGenerationReqInput())
        turn_all_but(harness, 2, count=50)
        assert all(harness.outputs[rid].finish for rid in rids)
        assert call not in harness.replies, "acknowledged is what holds on every rank"
        harness.turn_until(lambda: call in harness.replies)
        assert isinstance(harness.replies[call], ContinueGenerationReqOutput)
        harness.run_until_idle()
        assert len({rank.runner.num_steps for rank in harness.ranks}) == 1


def test_a_penalty_needs_the_last_token_on_every_rank() -> None:
    harness = SchedulerHarness(num_ranks=2, schedule=default_schedule(overlap=True))
    rid = harness.generate(range(1, 6), max_new_tokens=10, frequency_penalty=0.5)
    harness.run_until_idle()
    assert len(harness.outputs[rid].token_ids) == 10
    assert len({rank.runner.num_steps for rank in harness.ranks}) == 1
