"""Several ranks, each at its own speed and with its own faults: turn by turn they are the same.

What one of them did in a turn is compared with what the others did in theirs: state machines, contents,
queues, pages and forward passes. In the end every call has its one reply and every request its end.
"""

from __future__ import annotations

import os
import random
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ebbtide.srt.errors import EngineError, RequestRejected
from ebbtide.srt.managers.io_struct import (
    AbortReq,
    AbortWeightUpdateReqInput,
    AnyControlRequest,
    BeginWeightUpdateReqInput,
    ContinueGenerationReqInput,
    DestroyWeightsUpdateGroupReqInput,
    EndWeightUpdateReqInput,
    Expire,
    FlushCacheReqInput,
    GetWeightsByNameReqInput,
    InitWeightsUpdateGroupReqInput,
    PauseGenerationReqInput,
    PauseMode,
    PingReqInput,
    Refusal,
    ReleaseMemoryOccupationReqInput,
    ResizeMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightVersionReqInput,
)
from ebbtide.srt.memory_saver.tags import MemoryTag
from ebbtide.srt.model_executor.batch_plan import BatchPlan
from ebbtide.testing import NullWeights, SchedulerHarness, default_schedule
from ebbtide.testing.harness import NullRank

NUM_SEQUENCES = int(os.environ.get("EBBTIDE_FUZZ_SEQUENCES", "400")) // 8
NUM_RANKS = 3
TAGS = st.lists(st.sampled_from(list(MemoryTag)), max_size=3).map(tuple)
RANKS = st.integers(0, NUM_RANKS - 1)
TOLD = "told to fail"
# A commit that fails ends its process: see test_lockstep.
STEPS = [step for step in NullWeights.STEPS if step != "commit"]
SIMPLE: list[AnyControlRequest] = [
    AbortWeightUpdateReqInput(),
    UpdateWeightVersionReqInput(new_version="v"),
    GetWeightsByNameReqInput(name="layer.1"),
    InitWeightsUpdateGroupReqInput(master_address="a", master_port=1, rank_offset=1, world_size=4),
    DestroyWeightsUpdateGroupReqInput(),
    FlushCacheReqInput(),
    FlushCacheReqInput(timeout_s=1000.0),
    AbortReq(abort_all=True),
    PingReqInput(),
]


def described(plan: BatchPlan) -> tuple[Any, ...]:
    """What a forward pass computes."""
    arrays = (plan.input_ids_T, plan.page_rows_R, plan.starts_R, plan.num_new_R, plan.samples_R)
    return (*(tuple(array.tolist()) for array in arrays), tuple(spec.seed for spec in plan.specs))


def snapshot(rank: NullRank) -> tuple[Any, ...]:
    """Everything that must be the same on all ranks after the same turn."""
    scheduler = rank.scheduler
    control, policy = scheduler.control, scheduler.policy
    is_alone = control.operations.stands_alone
    missing, session = control.memory.content.missing, control.updates.report()
    is_resident = MemoryTag.WEIGHTS not in control.memory.released
    return (
        control.paused,
        control.can_run,
        control.allows_forward,
        control.reason,
        tuple(sorted(control.memory.released)),
        control.memory.content.state,
        control.updates.version,
        control.updates.model_path,
        session and session.num_tensors_staged,
        control.operations.any_pending,
        control.operations.is_working,
        rank.runner.num_under_way,
        is_alone,
        # What stands alone changes it at every rank's own speed.
        None if is_alone else tuple(memory.resident_bytes for memory in rank.runner.needed),
        tuple((req.rid, req.kv and (req.kv.num_launched, tuple(req.kv.pages))) for req in policy.running),
        tuple((req.rid, req.num_retractions) for req in policy.waiting),
        policy.holds_admission,
        policy.allocator.num_free,
        policy.cache.num_cached_pages,
        is_resident and tuple((name, rank.weights.live[name]) for name in rank.weights.names - missing),
    )


class RanksMachine(RuleBasedStateMachine):
    """Clients that know nothing of each other, against ranks that do not keep step."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, AnyControlRequest] = {}
        self.max_new_tokens: dict[str, int] = {}
        self.given_back = [0] * NUM_RANKS
        self.plans: list[list[tuple[Any, ...]]] = [[] for _ in range(NUM_RANKS)]
        self.snapshots: dict[int, tuple[Any, ...]] = {}

    @initialize(overlap=st.booleans(), keeps_weights=st.booleans(), seed=st.integers(0, 1 << 16))
    def start(self, overlap: bool, keeps_weights: bool, seed: int) -> None:
        # Between two rules every rank turns as often as it happens to, some seldom.
        self.random = random.Random(seed)
        self.speeds = [self.random.choice([1, 4, 16]) for _ in range(NUM_RANKS)]
        self.harness = SchedulerHarness(
            num_pages=40,
            context_len=64,
            schedule=default_schedule(max_running_requests=4, overlap=overlap),
            keeps_weights=keeps_weights,
            num_ranks=NUM_RANKS,
        )
        for index, rank in enumerate(self.harness.ranks):
            self.record_plans(index, rank)

    def record_plans(self, index: int, rank: NullRank) -> None:
        launch = rank.runner.launch

        def recorded(plan: BatchPlan) -> Any:
            self.plans[index].append((self.harness.num_turns(index), *described(plan)))
            return launch(plan)

        rank.runner.launch = recorded  # type: ignore[method-assign]

    @rule(
        length=st.integers(1, 40), first=st.integers(1, 3), count=st.integers(0, 40), seed=st.integers(0, 5)
    )
    def generate(self, length: int, first: int, count: int, seed: int) -> None:
        prompt = range(first, first + length)
        rid = self.harness.generate(prompt, seed=seed, max_new_tokens=min(count, 64 - length))
        self.max_new_tokens[rid] = min(count, 64 - length)
        self.go_on()

    @rule(is_stale=st.booleans())
    def wake_up(self, is_stale: bool) -> None:
        self.call(ResumeMemoryOccupationReqInput())
        if is_stale:
            self.call(UpdateWeightFromDiskReqInput(model_path="2", flush_cache=False))
        self.call(ContinueGenerationReqInput())

    @rule(mode=st.sampled_from(list(PauseMode)))
    def pause(self, mode: PauseMode) -> None:
        self.call(PauseGenerationReqInput(mode=mode))

    @rule(tags=TAGS, keeps=st.booleans())
    def release_or_resume(self, tags: tuple[MemoryTag, ...], keeps: bool) -> None:
        kind = ResumeMemoryOccupationReqInput if keeps else ReleaseMemoryOccupationReqInput
        self.call(kind(tags=tags))

    @rule(num_tokens=st.integers(60, 170))
    def resize(self, num_tokens: int) -> None:
        self.call(ResizeMemoryOccupationReqInput(num_tokens=num_tokens))

    @rule(
        value=st.integers(1, 9),
        mode=st.none() | st.sampled_from(list(PauseMode)),
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
        self.call(
            UpdateWeightFromDiskReqInput(
                model_path=str(value),
                weight_version=value,
                pause_mode=mode,
                flush_cache=flush_cache,
                manifest=manifest,
            )
        )

    @rule()
    def begin(self) -> None:
        self.call(BeginWeightUpdateReqInput(timeout_s=1000.0))

    @rule(
        mode=st.none() | st.sampled_from(list(PauseMode)),
        flush_cache=st.none() | st.booleans(),
        allow_incomplete=st.booleans(),
    )
    def end(self, mode: PauseMode | None, flush_cache: bool | None, allow_incomplete: bool) -> None:
        terms = {"pause_mode": mode, "flush_cache": flush_cache, "allow_incomplete": allow_incomplete}
        self.call(EndWeightUpdateReqInput(weight_version="e", **terms))  # type: ignore[arg-type]

    @rule(request=st.sampled_from(SIMPLE))
    def ask(self, request: AnyControlRequest) -> None:
        self.call(request)

    @rule(number=st.integers(0, 20), is_session=st.booleans())
    def expire(self, number: int, is_session: bool) -> None:
        waiting = [call for call in self.calls if call not in self.harness.replies]
        if is_session:
            self.harness.deliver(Expire(id=f"weight-session-{number % 3}"))
        elif waiting:
            self.harness.deliver(Expire(id=waiting[number % len(waiting)]))

    @rule(index=RANKS, step=st.sampled_from(STEPS), is_refused=st.booleans())
    def break_something(self, index: int, step: str, is_refused: bool) -> None:
        error = RequestRejected(f"{step} was {TOLD}") if is_refused else EngineError(f"{step} was {TOLD}")
        self.harness.ranks[index].weights.faults[step] = error

    @rule(index=RANKS, has_room=st.booleans(), slowness=st.sampled_from([0, 1, 5]))
    def change_a_rank(self, index: int, has_room: bool, slowness: int) -> None:
        weights = self.harness.ranks[index].weights
        weights.num_staged, weights.slowness = int(has_room), slowness

    @rule(index=RANKS, num_bytes=st.sampled_from([0, 0, 2900, 8000]))
    def trainer_takes_memory(self, index: int, num_bytes: int) -> None:
        device = self.harness.ranks[index].device
        device.used_bytes -= self.given_back[index]
        self.given_back[index] = min(num_bytes, device.free_bytes)
        device.take(self.given_back[index])

    @rule(count=st.sampled_from([1, 5, 40]))
    def turn_all(self, count: int) -> None:
        for _ in range(count):
            for index in range(NUM_RANKS):
                self.turn(index)

    def call(self, request: AnyControlRequest) -> None:
        self.calls[self.harness.call(request)] = request
        self.go_on()

    def go_on(self) -> None:
        for index in self.random.choices(
            range(NUM_RANKS), self.speeds, k=self.random.choice([0, 5, 25, 100])
        ):
            self.turn(index)

    def turn(self, index: int) -> None:
        before = self.harness.num_turns(index)
        self.harness.turn_rank(index)
        num_turns = self.harness.num_turns(index)
        if num_turns > before:
            state = snapshot(self.harness.ranks[index])
            assert self.snapshots.setdefault(num_turns, state) == state, f"rank {index} in turn {num_turns}"

    def turn_until_idle(self) -> None:
        for _ in range(3000):
            if not self.harness.is_busy and not self.looks_again():
                return
            for index in range(NUM_RANKS):
                self.turn(index)
        raise AssertionError("still busy")

    def looks_again(self) -> bool:
        """Whether an operation waits for what the loop is not told of: in the harness, every turn looks."""
        operations = [rank.scheduler.control.operations for rank in self.harness.ranks]
        return any(operation.any_pending for operation in operations)

    @invariant()
    def forward_passes_are_the_same(self) -> None:
        longest = max(self.plans, key=len)
        assert all(plans == longest[: len(plans)] for plans in self.plans)

    @invariant()
    def pages_add_up(self) -> None:
        for rank in self.harness.ranks:
            policy = rank.scheduler.policy
            held = [
                page for req in policy.running if req.kv for page in req.kv.pages[len(req.kv.lease.pages) :]
            ]
            assert len(held) == len(set(held))
            num_cached = policy.cache.num_cached_pages
            assert policy.allocator.num_free + num_cached + len(held) == policy.allocator.num_pages
            assert policy.allocator.num_pages + policy.allocator.num_withdrawn == self.harness.num_pages

    @invariant()
    def ranks_that_run_are_whole(self) -> None:
        state = self.harness.state
        assert state is not None
        assert [report.tp_rank for report in state.ranks] == list(range(NUM_RANKS))

    def teardown(self) -> None:
        """Everything that was accepted ends once all ranks are whole again and may run."""
        harness = self.harness
        for index, rank in enumerate(harness.ranks):
            self.trainer_takes_memory(index, 0)
            rank.weights.faults.clear()
            rank.weights.num_staged, rank.weights.slowness = 1, 0
        for _ in range(3):
            self.call(AbortWeightUpdateReqInput())
            self.call(ResumeMemoryOccupationReqInput())
            self.call(ResizeMemoryOccupationReqInput(num_tokens=4 * harness.num_pages))
            self.call(UpdateWeightFromDiskReqInput(model_path="1", flush_cache=False))
            self.call(ContinueGenerationReqInput())
            self.turn_until_idle()
        self.forward_passes_are_the_same()
        assert len({len(plans) for plans in self.plans}) == 1
        for rank in harness.ranks:
            assert (rank.chunks.lent, rank.chunks.num_spare) == (set(), 0)
            assert rank.scheduler.policy.allocator.num_withdrawn == 0
        assert set(harness.replies) == set(self.calls), "every call has its one reply"
        for rid, output in harness.outputs.items():
            assert output.finish is not None, f"{rid} was lost"
            if output.finish.kind == "length":
                assert len(output.token_ids) == self.max_new_tokens[rid]
        refusals = [reply for reply in harness.replies.values() if isinstance(reply, Refusal)]
        failures = [reply.message for reply in refusals if reply.status == 500]
        assert all(TOLD in message or "in time" in message for message in failures), failures
        assert all("rank" in reply.message for reply in refusals if TOLD in reply.message)
        for rank in harness.ranks:
            assert all(value == 1 for value in rank.weights.live.values())
            resident = sum(
                report.resident_bytes for report in rank.scheduler.control.memory.report().values()
            )
            assert rank.device.used_bytes == resident


RanksMachine.TestCase.settings = settings(
    max_examples=NUM_SEQUENCES,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestRanksFuzz = RanksMachine.TestCase
