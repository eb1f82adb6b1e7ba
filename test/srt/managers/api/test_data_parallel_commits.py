"""Updates of several replicas: real schedulers on null parts behind the real controller, turned by hand.

Whatever happens meanwhile, all replicas commit an update or none does.
"""

from __future__ import annotations

from typing import Any

import pytest
from fixtures.replicas_by_hand import Replicas

from ebbtide.srt.errors import EngineError, RequestRejected
from ebbtide.srt.managers.control.ports import OutOfStep
from ebbtide.srt.managers.io_struct import (
    AbortWeightUpdateReqInput,
    AnyControlRequest,
    BeginWeightUpdateReqInput,
    ContinueGenerationReqInput,
    EndWeightUpdateReqInput,
    Expire,
    FlushCacheReqInput,
    PauseGenerationReqInput,
    PauseMode,
    PingReqInput,
    PingReqOutput,
    Refusal,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    ResumeMemoryOccupationReqOutput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsReqOutput,
    UpdateWeightVersionReqInput,
    WeightSessionReqOutput,
)
from ebbtide.srt.managers.scheduling import lockstep
from ebbtide.srt.memory_saver.tags import MemoryTag

WEIGHTS = (MemoryTag.WEIGHTS,)

pytestmark = pytest.mark.parametrize("overlap", [False, True], ids=["in-turn", "overlap"], indirect=True)


def update(value: int, **fields: Any) -> UpdateWeightFromDiskReqInput:
    return UpdateWeightFromDiskReqInput(model_path=str(value), weight_version=value, **fields)


@pytest.fixture(params=[1, 2], ids=["tp1", "tp2"])
def replicas(request: pytest.FixtureRequest, overlap: None) -> Replicas:
    return Replicas(num_ranks=request.param)


def refused_on(replicas: Replicas, message: str) -> str:
    """What is said of a refusal by the last rank of replica 1."""
    num_ranks = len(replicas[1].ranks)
    return f"replica 1: {message}" if num_ranks == 1 else f"replica 1: rank {num_ranks - 1}: {message}"


class TestCommit:
    def test_none_commits_before_all_can_and_generation_goes_on(self, replicas: Replicas) -> None:
        rid = replicas[0].generate(range(1, 9), max_new_tokens=110)
        replicas.turn(0, count=3)
        call = replicas.call(update(7, pause_mode=PauseMode.RETRACT))
        replicas.turn(0, count=40)
        assert replicas[0].values == {0}
        assert len(replicas[0].outputs[rid].token_ids) > 30
        replicas.turn(1, count=40)
        assert call not in replicas.replies
        reply = replicas.answer(call, UpdateWeightsReqOutput)
        assert (reply.weight_version, reply.committed, reply.num_paused_requests) == ("7", True, 1)
        assert (replicas.values, replicas.versions) == ([{7}, {7}], ["7", "7"])
        starts = replicas[0].outputs[rid].version_starts
        assert [version for version, _ in starts] == ["default", "7"]
        assert len(replicas[0].outputs[rid].token_ids) == 110

    @pytest.mark.parametrize("step", ["open", "stage", "arrive", "map", "write", "complete", "release"])
    def test_one_that_refuses_is_named_and_none_changes(self, replicas: Replicas, step: str) -> None:
        request = update(7, manifest={"names": ["layer.0", "layer.1"], "is_sent": step == "arrive"})
        replicas[1].ranks[-1].weights.faults[step] = RequestRejected("cannot be done here")
        call = replicas.call(request)
        replicas.turn(0, 1, count=200)
        refusal = replicas.answer(call, Refusal)
        assert (refusal.status, refusal.message) == (400, refused_on(replicas, "cannot be done here"))
        assert (replicas.values, replicas.versions) == ([{0}, {0}], ["default", "default"])
        call = replicas.call(request)
        replicas.turn(0, 1, count=200)
        assert replicas.answer(call, UpdateWeightsReqOutput).committed
        assert (replicas.values, replicas.versions) == ([{0, 7}, {0, 7}], ["7", "7"])

    def test_what_all_refuse_is_said_once(self, replicas: Replicas) -> None:
        call = replicas.call(UpdateWeightFromDiskReqInput(model_path="no number"))
        replicas.turn(0)
        refusal = replicas.answer(call, Refusal)
        assert refusal.message == "model_path: expected an integer, got 'no number'"

    def test_one_that_waits_for_its_requests_gives_up_at_once(self, replicas: Replicas) -> None:
        rid = replicas[0].generate(range(1, 9), max_new_tokens=110)
        replicas.turn(0, count=3)
        replicas[1].weights.faults["write"] = RequestRejected("cannot be done here")
        call = replicas.call(update(7))
        replicas.turn(0, 1, count=40)
        assert isinstance(replicas.replies[call], Refusal)
        assert replicas[0].outputs[rid].finish is None
        # What came meanwhile is admitted again.
        other = replicas[0].generate([1, 2, 3], max_new_tokens=4)
        replicas.turn(0, count=20)
        assert replicas[0].outputs[other].finish is not None
        replicas.settle()
        assert replicas[0].outputs[rid].version_starts == [("default", 0)]

    @pytest.mark.parametrize("is_near", [False, True])
    def test_in_place_none_writes_before_all_are_ready(self, replicas: Replicas, is_near: bool) -> None:
        for rank in replicas[0].ranks:
            rank.weights.num_staged = int(is_near)
        replicas[1].ranks[-1].weights.faults["map"] = RequestRejected("cannot be done here")
        request = update(7, manifest={"is_near": is_near})
        call = replicas.call(request)
        replicas.turn(0, count=40)
        assert replicas[0].values == {0}
        refusal = replicas.answer(call, Refusal)
        assert (refusal.status, refusal.message) == (400, refused_on(replicas, "cannot be done here"))
        assert (replicas.values, replicas.versions) == ([{0}, {0}], ["default", "default"])
        assert [replica.can_run for replica in replicas.replicas] == [True, True]
        assert replicas.apply(request, UpdateWeightsReqOutput).staged is False
        assert (replicas.values, replicas.versions) == ([{7}, {7}], ["7", "7"])

    def test_stale_weights_stay_so_on_all(self, replicas: Replicas) -> None:
        replicas.call(ReleaseMemoryOccupationReqInput(tags=WEIGHTS))
        replicas.apply(ResumeMemoryOccupationReqInput(), ResumeMemoryOccupationReqOutput)
        replicas[1].weights.faults["write"] = RequestRejected("cannot be done here")
        call = replicas.call(update(7))
        replicas.turn(0, count=40)
        refusal = replicas.answer(call, Refusal)
        assert refusal.status == 400
        assert "replica 0: 4 parameters are stale" in refusal.message
        assert not any(replica.can_run for replica in replicas.replicas)
        replicas.apply(update(8), UpdateWeightsReqOutput)
        assert all(replica.can_run for replica in replicas.replicas)

    def test_senders_are_heard_to_their_end_where_others_have_refused(self, replicas: Replicas) -> None:
        senders = [rank.weights.sender for replica in replicas.replicas for rank in replica.ranks]
        call = replicas.call(UpdateWeightsFromIPCReqInput(zmq_handles={"a": "b"}, weight_version="7"))
        replicas.turn(0, 1)
        for sender in senders[len(replicas[0].ranks) :]:
            sender.says.append("out of power")
        replicas.turn(1)
        assert not any(sender.is_left for sender in senders[: len(replicas[0].ranks)])
        for sender in senders[: len(replicas[0].ranks)]:
            sender.says.extend([(7, ["layer.0"]), None])
        replicas.turn(0, 1, count=60)
        refusal = replicas.answer(call, Refusal)
        assert "the sender gave up: out of power" in refusal.message
        assert replicas.values == [{0}, {0}]
        assert all(sender.is_left for sender in senders)

    def test_a_commit_that_fails_after_the_verdict_ends_the_rank(self, replicas: Replicas) -> None:
        replicas[1].ranks[-1].weights.faults["commit"] = EngineError("the driver refused")
        replicas.call(update(7))
        with pytest.raises(OutOfStep, match="the driver refused"):
            replicas.settle()

    def test_a_second_update_waits_for_the_verdict_on_the_first(self, replicas: Replicas) -> None:
        first, second = replicas.call(update(7)), replicas.call(update(8))
        replicas.turn(0, count=40)
        assert replicas[0].values == {0}
        assert replicas.answer(first, UpdateWeightsReqOutput).weight_version == "7"
        assert replicas.answer(second, UpdateWeightsReqOutput).weight_version == "8"
        assert (replicas.values, replicas.versions) == ([{8}, {8}], ["8", "8"])


class TestInBetween:
    """An update that is prepared on replica 0, and not yet on replica 1, when something else is asked for."""

    @pytest.mark.parametrize("mode", [None, *PauseMode])
    @pytest.mark.parametrize(
        ("flush_cache", "was_paused"), [(True, None), (False, PauseMode.IN_PLACE), (True, PauseMode.RETRACT)]
    )
    @pytest.mark.parametrize(
        "request_",
        [
            *(PauseGenerationReqInput(mode=mode) for mode in PauseMode),
            ContinueGenerationReqInput(),
            ReleaseMemoryOccupationReqInput(tags=(MemoryTag.KV_CACHE,)),
            FlushCacheReqInput(),
            BeginWeightUpdateReqInput(),
            AbortWeightUpdateReqInput(),
            UpdateWeightVersionReqInput(new_version="other"),
            PingReqInput(),
        ],
        ids=lambda request: getattr(request, "mode", type(request).__name__),
    )
    def test_all_commit_or_none(
        self,
        overlap: None,
        mode: PauseMode | None,
        flush_cache: bool,
        request_: AnyControlRequest,
        was_paused: PauseMode | None,
    ) -> None:
        replicas = Replicas()
        rids = [replica.generate(range(1, 9), max_new_tokens=30) for replica in replicas.replicas]
        replicas.turn(0, 1, count=3)
        if was_paused is not None:
            replicas.call(PauseGenerationReqInput(mode=was_paused))
        updating = replicas.call(update(7, pause_mode=mode, flush_cache=flush_cache))
        replicas.turn(0, count=60)
        between = replicas.call(request_)
        replicas.turn(0, count=60)
        replicas.settle()
        assert {updating, between} <= replicas.replies.keys()
        is_done = not isinstance(replicas.replies[updating], Refusal)
        assert replicas.values == ([{7}, {7}] if is_done else [{0}, {0}])
        assert len(set(replicas.versions)) == 1
        for tidying in (AbortWeightUpdateReqInput(), ResumeMemoryOccupationReqInput()):
            replicas.call(tidying)
        replicas.call(ContinueGenerationReqInput())
        replicas.settle()
        for replica, rid in zip(replicas.replicas, rids, strict=True):
            assert replica.outputs[rid].finish is not None
            assert replica.can_run

    @pytest.mark.parametrize("keeps_weights", [False, True])
    def test_a_release_of_the_weights_ends_it_everywhere(self, overlap: None, keeps_weights: bool) -> None:
        replicas = Replicas(keeps_weights=keeps_weights, num_ranks=2)
        updating = replicas.call(update(7))
        replicas.turn(0, count=40)
        releasing = replicas.call(ReleaseMemoryOccupationReqInput(tags=WEIGHTS))
        replicas.settle()
        refusal = replicas.answer(updating, Refusal)
        assert "the weights were released in between" in refusal.message
        assert replicas.replies[releasing].success
        assert replicas.versions == ["default", "default"]

    def test_a_release_that_one_replica_cannot_do_leaves_the_old_weights_on_both(self, overlap: None) -> None:
        replicas = Replicas(has_memory_saver=False)
        updating = replicas.call(update(7))
        replicas.turn(0, count=40)
        replicas.call(ReleaseMemoryOccupationReqInput(tags=WEIGHTS))
        refusal = replicas.answer(updating, Refusal)
        assert "a request that ends it came in between" in refusal.message
        assert replicas.values == [{0}, {0}]

    def test_a_drain_that_ends_by_a_pause_ends_on_the_replica_that_drains(self, replicas: Replicas) -> None:
        rid = replicas[1].generate(range(1, 9), max_new_tokens=110)
        replicas.turn(1, count=3)
        updating = replicas.call(update(7))
        replicas.turn(0, 1, count=20)
        assert replicas[1].outputs[rid].finish is None
        replicas.call(PauseGenerationReqInput(mode=PauseMode.RETRACT))
        assert replicas.answer(updating, UpdateWeightsReqOutput).committed
        assert replicas.values == [{7}, {7}]
        assert replicas[1].outputs[rid].finish is None

    def test_health_is_answered_while_it_waits(self, replicas: Replicas) -> None:
        rid = replicas[1].generate(range(1, 9), max_new_tokens=110)
        replicas.turn(1, count=3)
        replicas.call(update(7))
        replicas.turn(0, 1, count=10)
        pinging = replicas.call(PingReqInput())
        replicas.turn(0, 1, count=3)
        assert isinstance(replicas.replies[pinging], PingReqOutput)
        assert replicas[1].outputs[rid].finish is None


class TestDeadlines:
    def test_a_prepared_replica_outlives_its_deadline_once(self, replicas: Replicas) -> None:
        call = replicas.call(update(7))
        replicas.turn(0, count=40)
        replicas[0].deliver(Expire(id=call))
        replicas.turn(0, count=5)
        assert call not in replicas.replies
        assert replicas.answer(call, UpdateWeightsReqOutput).committed
        assert replicas.values == [{7}, {7}]

    def test_no_verdict_and_it_gives_up_and_so_do_the_others(self, replicas: Replicas) -> None:
        call = replicas.call(update(7))
        replicas.turn(0, count=40)
        for _ in range(2):
            replicas[0].deliver(Expire(id=call))
            replicas.turn(0, count=5)
        refusal = replicas.answer(call, Refusal)
        assert refusal.message.startswith("replica 0: ")
        assert "not told in time" in refusal.message
        assert replicas.values == [{0}, {0}]
        replicas.apply(update(8), UpdateWeightsReqOutput)
        assert replicas.values == [{8}, {8}]

    def test_a_verdict_that_comes_too_late_is_a_failure_that_names_the_replica(
        self, replicas: Replicas
    ) -> None:
        call = replicas.call(update(7))
        replicas.turn(0, count=40)
        for _ in range(2):
            replicas[0].deliver(Expire(id=call))
            replicas[0].turn(5)
        # Its refusal is still on the way when the other says that it can.
        late, replicas[0].said = replicas[0].said, []
        replicas.turn(1, count=40)
        assert replicas[1].values == {7}
        replicas[0].said = late
        failure = replicas.answer(call, Refusal)
        assert failure.status == 500
        assert failure.message.startswith("replica 0: ")
        assert "The replicas serve different weights now: send the update again" in failure.message
        replicas.apply(update(8), UpdateWeightsReqOutput)
        assert replicas.values == [{8}, {8}]

    def test_a_deadline_that_one_replica_misses_is_missed_by_all(self, replicas: Replicas) -> None:
        rid = replicas[1].generate(range(1, 9), max_new_tokens=110)
        replicas.turn(1, count=3)
        call = replicas.call(update(7))
        replicas.turn(0, 1, count=20)
        for replica in replicas.replicas:
            replica.deliver(Expire(id=call))
        replicas.turn(0, 1, count=10)
        refusal = replicas.replies[call]
        assert isinstance(refusal, Refusal)
        assert refusal.message.startswith("replica 1: the update was given up at its deadline: 1 requests")
        replicas.settle()
        assert replicas[1].outputs[rid].version_starts == [("default", 0)]
        assert replicas.values == [{0}, {0}]

    def test_a_rank_that_hangs_at_the_commit_is_named_and_follows(
        self, overlap: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(lockstep, "ANSWER_GRACE_S", 0.0)
        replicas = Replicas(num_ranks=2)
        call = replicas.call(update(7, timeout_s=1.0))
        replicas.turn(0, count=40)
        replicas.turn(1, count=1)
        while replicas[1].num_waiting == 0:
            replicas.turn(1, count=1)
        replicas.turn(0, count=5)
        # The verdict is there, and one of its ranks does not turn any more.
        while call not in replicas.replies:
            replicas[1].turn_rank(0)
            replicas.read(1)
        failure = replicas.replies[call]
        assert isinstance(failure, Refusal)
        assert failure.status == 500
        assert failure.message.startswith("replica 1: rank 1: no answer within")
        assert [outcome["success"] for outcome in failure.fields["replicas"]] == [True, False]
        assert replicas.values == [{7}, {0, 7}]
        replicas.settle()
        assert (replicas.values, replicas.versions) == ([{7}, {7}], ["7", "7"])


class TestSessions:
    def begun(self, replicas: Replicas) -> None:
        replicas.apply(BeginWeightUpdateReqInput(timeout_s=1000.0), WeightSessionReqOutput)
        replicas.apply(update(7), UpdateWeightsReqOutput)

    def test_an_end_is_committed_by_all_together(self, replicas: Replicas) -> None:
        self.begun(replicas)
        call = replicas.call(EndWeightUpdateReqInput(weight_version="end"))
        replicas.turn(0, count=40)
        assert replicas[0].values == {0}
        assert replicas.answer(call, UpdateWeightsReqOutput).committed
        assert (replicas.values, replicas.versions) == ([{7}, {7}], ["end", "end"])

    def test_an_end_that_one_refuses_leaves_the_session_open_on_all(self, replicas: Replicas) -> None:
        self.begun(replicas)
        rid = replicas[1].generate(range(1, 9), max_new_tokens=110)
        replicas.turn(1, count=3)
        refusal = replicas.refuse(EndWeightUpdateReqInput(pause_mode=PauseMode.IN_PLACE))
        assert refusal.message.startswith("replica 1: 1 requests hold KV")
        assert replicas.values == [{0}, {0}]
        reply = replicas.apply(EndWeightUpdateReqInput(pause_mode=PauseMode.RETRACT), UpdateWeightsReqOutput)
        assert reply.committed
        assert replicas.values == [{7}, {7}]
        assert replicas[1].outputs[rid].finish is not None

    def test_a_session_that_is_gone_on_one_is_discarded_on_the_others(self, replicas: Replicas) -> None:
        self.begun(replicas)
        replicas[1].deliver(Expire(id="weight-session-0"))
        replicas.settle()
        refusal = replicas.refuse(EndWeightUpdateReqInput())
        assert "replica 1: no weight update session is open" in refusal.message
        assert refusal.message.endswith("The session was discarded, as others have it")
        assert replicas.values == [{0}, {0}]
        self.begun(replicas)
        replicas.apply(EndWeightUpdateReqInput(), UpdateWeightsReqOutput)
        assert replicas.values == [{7}, {7}]

    def test_a_session_that_is_gone_on_one_takes_no_part(self, replicas: Replicas) -> None:
        self.begun(replicas)
        replicas[1].deliver(Expire(id="weight-session-0"))
        replicas.settle()
        refusal = replicas.refuse(update(8))
        assert "a session was open on some replicas only" in refusal.message
        assert (replicas.values, replicas.versions) == ([{0}, {0}], ["default", "default"])
        replicas.apply(update(9), UpdateWeightsReqOutput)
        assert (replicas.values, replicas.versions) == ([{9}, {9}], ["9", "9"])

    def test_a_session_does_not_expire_while_its_end_waits_for_the_verdict(self, replicas: Replicas) -> None:
        self.begun(replicas)
        call = replicas.call(EndWeightUpdateReqInput())
        replicas.turn(0, count=40)
        replicas[0].deliver(Expire(id="weight-session-0"))
        replicas.turn(0, count=5)
        assert replicas.answer(call, UpdateWeightsReqOutput).committed
        assert replicas.values == [{7}, {7}]

    def test_an_abort_in_between_ends_it_everywhere(self, replicas: Replicas) -> None:
        self.begun(replicas)
        ending = replicas.call(EndWeightUpdateReqInput())
        replicas.turn(0, count=40)
        replicas.apply(AbortWeightUpdateReqInput(), WeightSessionReqOutput)
        assert "aborted by abort_weight_update" in replicas.answer(ending, Refusal).message
        assert replicas.values == [{0}, {0}]

    def test_a_version_that_is_given_in_between_is_that_of_all(self, replicas: Replicas) -> None:
        self.begun(replicas)
        ending = replicas.call(EndWeightUpdateReqInput())
        replicas.turn(0, count=40)
        replicas.call(UpdateWeightVersionReqInput(new_version="late"))
        assert replicas.answer(ending, UpdateWeightsReqOutput).weight_version == "late"
        assert replicas.versions == ["late", "late"]
