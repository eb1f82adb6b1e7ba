"""Updates of several replicas: real schedulers on null parts behind the real controller, turned by hand.

Whatever happens meanwhile, all replicas commit an update or none does.
"""

from types import SimpleNamespace
from typing import Any

import pytest
from fixtures.control import updating
from fixtures.replicas_by_hand import Replicas

from ebbtide.srt.errors import EngineError, RequestRejected
from ebbtide.srt.managers.control import OutOfStep
from ebbtide.srt.managers.io_struct import (
    AbortWeightUpdateReqInput,
    AnyControlRequest,
    BeginWeightUpdateReqInput,
    CheckWeightsReqInput,
    ControlCall,
    EndWeightUpdateReqInput,
    Expire,
    PauseMode,
    Prepared,
    Refusal,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    ResumeMemoryOccupationReqOutput,
    TokenizedGenerateReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsReqOutput,
    UpdateWeightVersionReqInput,
    Verdict,
    WeightSessionReqOutput,
)
from ebbtide.srt.managers.scheduling import lockstep
from ebbtide.srt.memory_saver import MemoryTag
from ebbtide.srt.sampling_params import SamplingParams

WEIGHTS = (MemoryTag.WEIGHTS,)
SESSION = "weight-session-0"


# The one without the other is in test_data_parallel_fuzz.
@pytest.fixture(params=[1, 2], ids=["tp1-in-turn", "tp2-overlap"])
def replicas(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Replicas:
    monkeypatch.setattr("ebbtide.testing.harness.OVERLAP", request.param == 2)
    return Replicas(num_ranks=request.param)


def update(value: int, *layers: int, **fields: Any) -> UpdateWeightFromDiskReqInput:
    return updating(value, *layers, weight_version=value, **fields)


def prepared(replicas: Replicas, request: AnyControlRequest) -> str:
    """A call that replica 0 has prepared, and replica 1 not yet heard of."""
    call = replicas.call(request)
    replicas.turn(0, count=40)
    return call


def start_stream(replicas: Replicas, dp_rank: int) -> str:
    """A request on a replica that still runs after a hundred turns."""
    rid = replicas[dp_rank].generate(range(1, 9), max_new_tokens=110)
    replicas.turn(dp_rank, count=3)
    return rid


def assert_serve(replicas: Replicas, value: int, version: str) -> None:
    """All replicas, under this version."""
    assert (replicas.values, replicas.versions) == ([{value}] * 2, [version] * 2)


def new_prompt(index: int) -> TokenizedGenerateReqInput:
    """A prompt of its own."""
    return TokenizedGenerateReqInput(
        rid=f"r{index}", input_ids=[index], sampling_params=SamplingParams(), max_new_tokens=1, seed=0
    )


def refused_on(replicas: Replicas, message: str) -> str:
    """What is said of a refusal by the last rank of replica 1."""
    num_ranks = len(replicas[1].ranks)
    return f"replica 1: {message}" if num_ranks == 1 else f"replica 1: rank {num_ranks - 1}: {message}"


class TestCommit:
    def test_none_commits_before_all_can_and_generation_goes_on(self, replicas: Replicas) -> None:
        rid = start_stream(replicas, 0)
        call = prepared(replicas, update(7, pause_mode=PauseMode.RETRACT))
        assert replicas[0].values == {0}
        assert len(replicas[0].outputs[rid].token_ids) > 30
        replicas.turn(1, count=40)
        assert call not in replicas.replies
        reply = replicas.answer(call, UpdateWeightsReqOutput)
        assert (reply.weight_version, reply.committed, reply.num_paused_requests) == ("7", True, 1)
        assert_serve(replicas, 7, "7")
        output = replicas[0].outputs[rid]
        assert [version for version, _ in output.version_starts] == ["default", "7"]
        assert len(output.token_ids) == 110

    @pytest.mark.parametrize("refusal", [None, "another engine has refused"])
    def test_the_verdict_on_several_engines_comes_from_above(
        self, replicas: Replicas, refusal: str | None
    ) -> None:
        call = ControlCall(id="above", request=update(7), is_joint=True)
        replicas.controller.send(call)
        replicas.settle()
        assert isinstance(replicas.replies.pop("above"), Prepared)
        assert_serve(replicas, 0, "default")
        replicas.controller.send(Verdict(id="above", refusal=refusal))
        if refusal is None:
            assert replicas.answer("above", UpdateWeightsReqOutput).committed
            assert_serve(replicas, 7, "7")
        else:
            assert replicas.answer("above", Refusal).message == refusal
            assert_serve(replicas, 0, "default")

    def test_a_snapshot_that_one_has_no_room_for_is_kept_by_none(self, replicas: Replicas) -> None:
        replicas[1].ranks[-1].weights.faults["check"] = RequestRejected("no room", 409)
        kept = replicas.call(CheckWeightsReqInput(action="snapshot"))
        replicas.turn(0, 1, count=60)
        assert replicas.answer(kept, Refusal).message == refused_on(replicas, "no room")
        compared = replicas.call(CheckWeightsReqInput(action="compare"))
        replicas.turn(0, 1, count=60)
        # Nobody is named: it is so of both.
        assert replicas.answer(compared, Refusal).message.startswith("there is no snapshot")

    @pytest.mark.parametrize("step", ["open", "arrive", "map", "complete"])
    def test_one_that_refuses_is_named_and_none_changes(self, replicas: Replicas, step: str) -> None:
        request = update(7, 0, 1, is_sent=step == "arrive")
        replicas[1].ranks[-1].weights.faults[step] = RequestRejected("cannot be done here")
        call = replicas.call(request)
        replicas.turn(0, 1, count=60)
        refusal = replicas.answer(call, Refusal)
        assert (refusal.status, refusal.message) == (400, refused_on(replicas, "cannot be done here"))
        assert_serve(replicas, 0, "default")
        call = replicas.call(request)
        replicas.turn(0, 1, count=60)
        assert replicas.answer(call, UpdateWeightsReqOutput).committed
        assert (replicas.values, replicas.versions) == ([{0, 7}, {0, 7}], ["7", "7"])

    @pytest.mark.parametrize("near_bytes", [None, 1])
    def test_in_place_none_writes_before_all_are_ready(
        self, replicas: Replicas, near_bytes: int | None
    ) -> None:
        for rank in replicas[0].ranks:
            rank.weights.num_staged = int(near_bytes is not None)
        replicas[1].ranks[-1].weights.faults["map"] = RequestRejected("cannot be done here")
        call = prepared(replicas, update(7, near_bytes=near_bytes))
        assert replicas[0].values == {0}
        refusal = replicas.answer(call, Refusal)
        assert (refusal.status, refusal.message) == (400, refused_on(replicas, "cannot be done here"))
        assert_serve(replicas, 0, "default")
        assert [replica.can_run for replica in replicas.replicas] == [True, True]
        assert replicas.apply(update(7, near_bytes=near_bytes), UpdateWeightsReqOutput).staged is False
        assert_serve(replicas, 7, "7")

    def test_stale_weights_stay_so_on_all(self, replicas: Replicas) -> None:
        replicas.call(ReleaseMemoryOccupationReqInput(tags=WEIGHTS))
        replicas.apply(ResumeMemoryOccupationReqInput(), ResumeMemoryOccupationReqOutput)
        replicas[1].weights.faults["write"] = RequestRejected("cannot be done here")
        refusal = replicas.answer(prepared(replicas, update(7)), Refusal)
        assert refusal.status == 400
        assert "replica 0: 4 parameters are stale" in refusal.message
        assert not any(replica.can_run for replica in replicas.replicas)
        replicas.apply(update(8), UpdateWeightsReqOutput)
        assert all(replica.can_run for replica in replicas.replicas)

    def test_senders_are_heard_to_their_end_where_others_have_refused(self, replicas: Replicas) -> None:
        [first, second] = [[rank.weights.sender for rank in each.ranks] for each in replicas.replicas]
        call = replicas.call(UpdateWeightsFromIPCReqInput(zmq_handles={"a": "b"}, weight_version="7"))
        replicas.turn(0, 1)
        for sender in second:
            sender.says.append("out of power")
        replicas.turn(1)
        assert not any(sender.is_left for sender in first)
        for sender in first:
            sender.says.extend([(7, ["layer.0"]), None])
        replicas.turn(0, 1, count=60)
        assert "the sender gave up: out of power" in replicas.answer(call, Refusal).message
        assert replicas.values == [{0}, {0}]
        assert all(sender.is_left for sender in first + second)

    def test_a_commit_that_fails_after_the_verdict_ends_the_rank(self, replicas: Replicas) -> None:
        replicas[1].ranks[-1].weights.faults["commit"] = EngineError("the driver refused")
        replicas.call(update(7))
        with pytest.raises(OutOfStep, match="the driver refused"):
            replicas.settle()


class TestInBetween:
    """An update that is prepared on replica 0, and not yet on replica 1, when something else is asked for."""

    @pytest.mark.parametrize("keeps_weights", [False, True])
    def test_a_release_of_the_weights_ends_it_everywhere(self, keeps_weights: bool) -> None:
        replicas = Replicas(keeps_weights=keeps_weights, num_ranks=2)
        call = prepared(replicas, update(7))
        releasing = replicas.call(ReleaseMemoryOccupationReqInput(tags=WEIGHTS))
        replicas.settle()
        assert "the weights were released in between" in replicas.answer(call, Refusal).message
        assert replicas.replies[releasing].success
        assert replicas.versions == ["default", "default"]


class TestDeadlines:
    def expire(self, replicas: Replicas, call: str) -> None:
        """Twice on replica 0, which a deadline alone does not end; its answers stay on the way."""
        for is_over in (False, True):
            replicas[0].deliver(Expire(id=call))
            replicas[0].turn(5)
            assert replicas[0].can_run is not is_over

    def test_no_verdict_and_it_serves_nothing_until_all_give_up(self, replicas: Replicas) -> None:
        call = prepared(replicas, update(7))
        self.expire(replicas, call)
        replicas.read(0)
        replicas.turn(0, count=5)
        assert replicas[0].can_run
        refusal = replicas.answer(call, Refusal)
        assert "replica 0 was ready, and was not told in time that all were" in refusal.message
        assert replicas.values == [{0}, {0}]
        replicas.apply(update(8), UpdateWeightsReqOutput)
        assert replicas.values == [{8}, {8}]

    def test_a_verdict_that_comes_late_finds_a_replica_that_has_served_nothing_since(
        self, replicas: Replicas, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rid = start_stream(replicas, 0)
        call = prepared(replicas, update(7, pause_mode=PauseMode.IN_PLACE, flush_cache=False))
        self.expire(replicas, call)
        num_tokens = len(replicas[0].outputs[rid].token_ids)
        # What it says is still on the way when the other says that it can, and so is what it is told.
        late, replicas[0].said = replicas[0].said, []
        replicas.turn(1, count=40)
        assert replicas.values == [{0}, {7}]
        assert "its verdict has not come" in replicas[0].scheduler.control.reason
        assert len(replicas[0].outputs[rid].token_ids) == num_tokens
        # New prompts go to the other one.
        monkeypatch.setattr("ebbtide.srt.managers.api.data_parallel_controller.LATE_S", 0.0)
        prompts = [new_prompt(index) for index in range(4)]
        assert {one.dp_rank for one in replicas.controller.place(prompts)} == {1}
        replicas[0].said = late
        assert replicas.answer(call, UpdateWeightsReqOutput).committed
        assert_serve(replicas, 7, "7")
        assert replicas[0].outputs[rid].finish is not None
        assert {one.dp_rank for one in replicas.controller.place(prompts)} == {0, 1}

    def test_a_deadline_that_one_replica_misses_is_missed_by_all(self, replicas: Replicas) -> None:
        rid = start_stream(replicas, 1)
        call = replicas.call(update(7))
        replicas.turn(0, 1, count=20)
        for replica in replicas.replicas:
            replica.deliver(Expire(id=call))
        replicas.turn(0, 1, count=10)
        message = replicas.replies[call].message
        assert message.startswith("replica 1: the update was given up at its deadline: 1 requests")
        replicas.settle()
        assert replicas[1].outputs[rid].version_starts == [("default", 0)]
        assert replicas.values == [{0}, {0}]

    def test_a_rank_that_hangs_at_the_commit_is_named_and_follows(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock = SimpleNamespace(monotonic=lambda: 0.0)
        monkeypatch.setattr(lockstep, "time", clock)
        replicas = Replicas(num_ranks=2)
        call = prepared(replicas, update(7, timeout_s=1.0))
        replicas.turn(1, count=1)
        while replicas[1].num_waiting == 0:
            replicas.turn(1, count=1)
        replicas.turn(0, count=5)
        # The verdict is there, and one of its ranks does not turn any more.
        for now_s in (0.0, 1.0 + lockstep.ANSWER_GRACE_S):
            clock.monotonic = lambda now_s=now_s: now_s
            for _ in range(20):
                replicas[1].turn_rank(0)
                replicas.read(1)
        failure = replicas.replies[call]
        assert failure.status == 500
        assert failure.message.startswith("replica 1: rank 1: no answer within")
        assert [outcome["success"] for outcome in failure.fields["replicas"]] == [True, False]
        assert replicas.values == [{7}, {0, 7}]
        replicas.settle()
        assert_serve(replicas, 7, "7")


class TestSessions:
    @pytest.fixture
    def begun(self, replicas: Replicas) -> Replicas:
        """With new weights in a session that is open on all."""
        replicas.apply(BeginWeightUpdateReqInput(timeout_s=1000.0), WeightSessionReqOutput)
        replicas.apply(update(7), UpdateWeightsReqOutput)
        return replicas

    def test_an_end_is_committed_by_all_together_and_its_session_does_not_expire_meanwhile(
        self, begun: Replicas
    ) -> None:
        call = prepared(begun, EndWeightUpdateReqInput(weight_version="end"))
        assert begun[0].values == {0}
        begun[0].deliver(Expire(id=SESSION))
        begun.turn(0, count=5)
        assert begun.answer(call, UpdateWeightsReqOutput).committed
        assert_serve(begun, 7, "end")

    def test_an_end_that_one_refuses_leaves_the_session_open_on_all(self, begun: Replicas) -> None:
        rid = start_stream(begun, 1)
        refusal = begun.refuse(EndWeightUpdateReqInput(pause_mode=PauseMode.IN_PLACE))
        assert refusal.message.startswith("replica 1: 1 requests hold KV")
        assert begun.values == [{0}, {0}]
        end = EndWeightUpdateReqInput(pause_mode=PauseMode.RETRACT)
        assert begun.apply(end, UpdateWeightsReqOutput).committed
        assert begun.values == [{7}, {7}]
        assert begun[1].outputs[rid].finish is not None

    def test_a_session_of_which_one_refused_a_part_is_discarded_on_both(self, begun: Replicas) -> None:
        begun[0].weights.faults["open"] = RequestRejected("cannot be done here")
        assert "session was discarded" in begun.refuse(update(8)).message
        assert "no weight update session is open" in begun.refuse(EndWeightUpdateReqInput()).message
        assert_serve(begun, 0, "default")

    def test_a_session_that_is_gone_on_one_is_discarded_on_the_others(self, begun: Replicas) -> None:
        begun[1].deliver(Expire(id=SESSION))
        begun.settle()
        refusal = begun.refuse(EndWeightUpdateReqInput())
        assert "replica 1: no weight update session is open" in refusal.message
        assert refusal.message.endswith("The session was discarded, as others have it")
        assert begun.values == [{0}, {0}]
        begun.apply(BeginWeightUpdateReqInput(), WeightSessionReqOutput)

    @pytest.mark.parametrize("is_update", [False, True])
    def test_a_session_that_is_gone_on_one_takes_no_part(self, begun: Replicas, is_update: bool) -> None:
        begun[1].deliver(Expire(id=SESSION))
        begun.settle()
        refusal = begun.refuse(update(8) if is_update else UpdateWeightVersionReqInput(new_version="v"))
        assert "a session was open on some replicas only" in refusal.message
        assert refusal.status < 500
        assert_serve(begun, 0, "default")
        begun.apply(update(9), UpdateWeightsReqOutput)
        assert_serve(begun, 9, "9")

    def test_an_abort_in_between_ends_it_everywhere(self, begun: Replicas) -> None:
        call = prepared(begun, EndWeightUpdateReqInput())
        begun.apply(AbortWeightUpdateReqInput(), WeightSessionReqOutput)
        assert "aborted by abort_weight_update" in begun.answer(call, Refusal).message
        assert begun.values == [{0}, {0}]
