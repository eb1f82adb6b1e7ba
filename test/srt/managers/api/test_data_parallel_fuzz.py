"""Any order of requests, deadlines and failures: all replicas commit an update, or none does."""

from __future__ import annotations

import os
import random
from typing import Any

import hypothesis.strategies as st
from fixtures.replicas_by_hand import Replicas
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ebbtide.srt.errors import EngineError, RequestRejected
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
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsReqOutput,
    UpdateWeightVersionReqInput,
)
from ebbtide.srt.memory_saver.tags import MemoryTag
from ebbtide.testing import default_schedule

NUM_SEQUENCES = int(os.environ.get("EBBTIDE_FUZZ_SEQUENCES", "400")) // 8
NUM_REPLICAS = 2
REPLICAS = st.integers(0, NUM_REPLICAS - 1)
MODES = st.none() | st.sampled_from(list(PauseMode))
TAGS = st.lists(st.sampled_from(list(MemoryTag)), max_size=2).map(tuple)
STEPS = ["open", "stage", "arrive", "map", "write", "complete", "release"]
SIMPLE: list[AnyControlRequest] = [
    PingReqInput(),
    FlushCacheReqInput(),
    ContinueGenerationReqInput(),
    AbortWeightUpdateReqInput(),
    BeginWeightUpdateReqInput(timeout_s=1000.0),
    BeginWeightUpdateReqInput(timeout_s=1000.0),
]


class ReplicasMachine(RuleBasedStateMachine):
    """Clients that know nothing of each other, against replicas of which each has its own speed."""

    @initialize(
        overlap=st.booleans(),
        keeps_weights=st.booleans(),
        num_ranks=st.integers(1, 2),
        seed=st.integers(0, 1 << 16),
    )
    def start(self, overlap: bool, keeps_weights: bool, num_ranks: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.expired: set[tuple[str, int]] = set()
        self.replicas = Replicas(
            NUM_REPLICAS,
            num_pages=40,
            context_len=64,
            schedule=default_schedule(max_running_requests=4, overlap=overlap),
            keeps_weights=keeps_weights,
            num_ranks=num_ranks,
        )

    @rule(dp_rank=REPLICAS, length=st.integers(1, 30), count=st.integers(0, 30))
    def generate(self, dp_rank: int, length: int, count: int) -> None:
        self.replicas[dp_rank].generate(range(1, 1 + length), max_new_tokens=count)
        self.go_on()

    @rule(
        value=st.integers(1, 9),
        mode=MODES,
        flush_cache=st.booleans(),
        num_names=st.none() | st.integers(0, 4),
        is_sent=st.booleans(),
    )
    def update(
        self, value: int, mode: PauseMode | None, flush_cache: bool, num_names: int | None, is_sent: bool
    ) -> None:
        manifest: dict[str, Any] = {"is_sent": is_sent}
        if num_names is not None:
            manifest["names"] = [f"layer.{index}" for index in range(num_names)]
        terms = {"weight_version": value, "pause_mode": mode, "flush_cache": flush_cache}
        self.call(UpdateWeightFromDiskReqInput(model_path=str(value), manifest=manifest, **terms))  # type: ignore[arg-type]

    @rule(mode=MODES, flush_cache=st.none() | st.booleans(), version=st.none() | st.just("e"))
    def end(self, mode: PauseMode | None, flush_cache: bool | None, version: str | None) -> None:
        terms = {"pause_mode": mode, "flush_cache": flush_cache, "allow_incomplete": version is None}
        self.call(EndWeightUpdateReqInput(weight_version=version, **terms))  # type: ignore[arg-type]

    @rule(request=st.sampled_from(SIMPLE))
    def ask(self, request: AnyControlRequest) -> None:
        self.call(request)

    @rule()
    def name_version(self) -> None:
        """In a session it takes effect with that; on a replica that has lost its own, at once."""
        has_session = {replica.scheduler.control.updates.is_under_way for replica in self.replicas.replicas}
        if has_session == {False}:
            self.call(UpdateWeightVersionReqInput(new_version="v"))

    @rule(mode=st.sampled_from(list(PauseMode)))
    def pause(self, mode: PauseMode) -> None:
        self.call(PauseGenerationReqInput(mode=mode))

    @rule(tags=TAGS, resumes=st.booleans())
    def release_or_resume(self, tags: tuple[MemoryTag, ...], resumes: bool) -> None:
        kind = ResumeMemoryOccupationReqInput if resumes else ReleaseMemoryOccupationReqInput
        self.call(kind(tags=tags))

    @rule(dp_rank=REPLICAS, number=st.integers(0, 20), is_session=st.booleans())
    def expire(self, dp_rank: int, number: int, is_session: bool) -> None:
        """A deadline comes once; each replica looks at its own clock."""
        waiting = [call for call in self.replicas.calls if call not in self.replicas.replies]
        if is_session:
            self.replicas[dp_rank].deliver(Expire(id=f"weight-session-{number % 3}"))
        elif waiting:
            call = waiting[number % len(waiting)]
            if (call, dp_rank) not in self.expired:
                self.expired.add((call, dp_rank))
                self.replicas[dp_rank].deliver(Expire(id=call))
        self.go_on()

    @rule(dp_rank=REPLICAS, step=st.sampled_from(STEPS), is_refused=st.booleans())
    def break_something(self, dp_rank: int, step: str, is_refused: bool) -> None:
        rank = self.random.choice(self.replicas[dp_rank].ranks)
        rank.weights.faults[step] = RequestRejected(step) if is_refused else EngineError(step)

    @rule(dp_rank=REPLICAS, has_room=st.booleans(), slowness=st.sampled_from([0, 1, 5]))
    def change_a_replica(self, dp_rank: int, has_room: bool, slowness: int) -> None:
        for rank in self.replicas[dp_rank].ranks:
            rank.weights.num_staged, rank.weights.slowness = int(has_room), slowness

    @rule(dp_rank=REPLICAS, num_bytes=st.sampled_from([0, 2900, 8000]))
    def trainer_takes_memory(self, dp_rank: int, num_bytes: int) -> None:
        device = self.replicas[dp_rank].device
        given_back = self.taken.get(dp_rank, 0)
        device.used_bytes -= given_back
        self.taken[dp_rank] = min(num_bytes, device.free_bytes)
        device.take(self.taken[dp_rank])

    @rule(count=st.sampled_from([1, 5, 40]))
    def turn_all(self, count: int) -> None:
        self.replicas.turn(*range(NUM_REPLICAS), count=count)

    def call(self, request: AnyControlRequest) -> None:
        self.replicas.call(request)
        self.go_on()

    def go_on(self) -> None:
        for _ in range(self.random.choice([0, 1, 4])):
            self.replicas.turn(self.random.randrange(NUM_REPLICAS), count=self.random.choice([1, 5, 25]))

    @property
    def taken(self) -> dict[int, int]:
        return self.__dict__.setdefault("_taken", {})

    @invariant()
    def none_is_a_commit_ahead_for_good(self) -> None:
        longest = max((replica.committed for replica in self.replicas.replicas), key=len)
        assert all(
            replica.committed == longest[: len(replica.committed)] for replica in self.replicas.replicas
        )

    def teardown(self) -> None:
        """Every call is answered, what was said to be committed is so everywhere, and nothing else is."""
        replicas = self.replicas
        for dp_rank, replica in enumerate(replicas.replicas):
            self.trainer_takes_memory(dp_rank, 0)
            for rank in replica.ranks:
                rank.weights.faults.clear()
                rank.weights.num_staged, rank.weights.slowness = 1, 0
        for _ in range(3):
            replicas.call(AbortWeightUpdateReqInput())
            replicas.call(ResumeMemoryOccupationReqInput())
            replicas.call(ContinueGenerationReqInput())
            replicas.turn(*range(NUM_REPLICAS), count=300)
        assert replicas.replies.keys() == replicas.calls.keys()
        committed = [
            call
            for call, reply in replicas.replies.items()
            if isinstance(reply, UpdateWeightsReqOutput) and reply.committed
        ]
        for replica in replicas.replicas:
            assert sorted(replica.committed) == sorted(committed)
            assert not replica.scheduler.control.operations.any_pending
        assert len(set(replicas.versions)) == 1
        missing = frozenset[str]().union(
            *(replica.scheduler.control.memory.content.missing for replica in replicas.replicas)
        )
        names = replicas[0].weights.names - missing
        held = [{name: replica.weights.live[name] for name in names} for replica in replicas.replicas]
        assert held[0] == held[1]


ReplicasMachine.TestCase.settings = settings(
    max_examples=NUM_SEQUENCES,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestReplicasFuzz = ReplicasMachine.TestCase
