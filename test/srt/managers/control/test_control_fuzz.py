"""Any order of requests, on one rank and on several, each at its own speed and with its own faults.

After every turn the invariants hold. What one rank did in a turn is compared with what the others did in
theirs: state machines, contents, queues, pages and forward passes. In the end every call has its one reply
and every request its end.
"""

from types import SimpleNamespace
from typing import Any

import pytest
from fixtures.control import updating
from fixtures.control_fuzz import BROKEN, Clients
from fixtures.deadlines import HANG_S
from fixtures.fuzz import fuzzed
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from ebbtide.srt.managers.control import kv_cache
from ebbtide.srt.managers.control.control_plane import limit_s
from ebbtide.srt.managers.io_struct import (
    AbortReq,
    AnyControlRequest,
    CheckWeightsReqInput,
    ContinueGenerationReqInput,
    DestroyWeightsUpdateGroupReqInput,
    Expire,
    FlushCacheReqInput,
    GetWeightsByNameReqInput,
    InitWeightsUpdateGroupReqInput,
    Preserve,
    Refusal,
    ReleaseMemoryOccupationReqInput,
    ResizeMemoryOccupationReqInput,
    UpdateWeightVersionReqInput,
)
from ebbtide.srt.managers.scheduler import MEMORY_WAIT, WAITS_FOR_MEMORY
from ebbtide.srt.managers.scheduling import lockstep
from ebbtide.srt.managers.wire.generation import VersionContract
from ebbtide.srt.mem_cache import Windows
from ebbtide.srt.memory_saver import MemoryTag
from ebbtide.srt.model_executor.batch_plan import BatchPlan, PassOutOfMemory
from ebbtide.srt.model_executor.pass_room import PassRoom
from ebbtide.testing import SchedulerHarness, default_schedule
from ebbtide.testing.harness import NullRank

# The versions that the last updates give are later than any that is waited for here.
CONTRACTS = st.builds(
    VersionContract,
    max_lag=st.sampled_from([None, None, None, 0, 1]),
    min_version=st.sampled_from([None, None, None, "3", "9"]),
    on_update=st.sampled_from(["continue", "continue", "recompute", "abort"]),
)
SIMPLE: list[AnyControlRequest] = [
    UpdateWeightVersionReqInput(new_version="v"),
    UpdateWeightVersionReqInput(new_version="w", abort_all_requests=True),
    GetWeightsByNameReqInput(name="layer.1"),
    InitWeightsUpdateGroupReqInput(master_address="a", master_port=1, rank_offset=1, world_size=4),
    DestroyWeightsUpdateGroupReqInput(),
    FlushCacheReqInput(timeout_s=1000.0),
    FlushCacheReqInput(retract_running=True),
    *(ReleaseMemoryOccupationReqInput(tags=(MemoryTag.WEIGHTS,), backup=keeps) for keeps in (True, False)),
    *(CheckWeightsReqInput(action=action) for action in ("checksum", "snapshot", "reset_tensors", "compare")),
    AbortReq(abort_all=True),
    *(AbortReq(rid=f"req-{index}") for index in range(4)),
]


@pytest.fixture(autouse=True)
def whatever_the_size_and_the_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others come between the parts of a resize; a rank that turns late on a busy machine is waited for."""
    monkeypatch.setattr(kv_cache, "PART_BYTES", 1)
    monkeypatch.setattr(lockstep, "ANSWER_GRACE_S", HANG_S)


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
        control.memory.content.missing,
        control.updates.version,
        control.updates.model_path,
        session and session.num_tensors_staged,
        control.operations.any_pending,
        control.operations.is_working,
        len(rank.runner.under_way),
        is_alone,
        # What stands alone, or comes beside forward passes, changes it at every rank's own speed.
        None
        if is_alone or control.memory.is_kv_partial
        else tuple(memory.resident_bytes for memory in rank.runner.needed),
        tuple(
            (req.rid, req.kv and (req.kv.num_launched, str(req.kv.pages), str(req.kv.firsts)))
            for req in policy.running
        ),
        tuple((req.rid, req.num_retractions) for req in policy.waiting),
        policy.holds_admission,
        policy.allocator.num_free,
        policy.cache.num_evictable_pages,
        is_resident and tuple((name, rank.weights.live[name]) for name in rank.weights.names - missing),
    )


class CountingGroup:
    """Where ranks would wait for each other before a pass: those that do must be the same on all of them."""

    def __init__(self) -> None:
        self.size, self.rank, self.num_asked = 2, 0, 0

    def smallest(self, value: int) -> int:
        self.num_asked += 1
        return value


class ControlMachine(Clients):
    """Clients of a replica whose ranks do not keep step."""

    @initialize(
        num_ranks=st.sampled_from([1, 3]),
        overlap=st.booleans(),
        keeps_weights=st.booleans(),
        policy=st.sampled_from(["fcfs", "priority", "lpm"]),
        cache_by_version=st.booleans(),
        cache=st.sampled_from([((None,), None), ((None, 10), None), ((7,), None), ((None,), 3)]),
        seed=st.integers(0, 1 << 16),
    )
    def start(
        self,
        num_ranks: int,
        overlap: bool,
        keeps_weights: bool,
        policy: str,
        cache_by_version: bool,
        cache: tuple[Windows, int | None],
        seed: int,
    ) -> None:
        windows, num_checkpoints = cache
        self.harness = SchedulerHarness(
            num_pages=(24 if num_ranks == 1 else 40) + 16 * (len(windows) - 1),
            context_len=64,
            schedule=default_schedule(max_running_requests=4, overlap=overlap, policy=policy),
            cache_by_version=cache_by_version,
            keeps_weights=keeps_weights,
            num_ranks=num_ranks,
            windows=windows,
            num_checkpoints=num_checkpoints,
        )
        self.begin(self.harness.ranks, seed)
        self.speeds = [self.random.choice([1, 4, 16]) for _ in self.ranks]
        self.calls: dict[str, AnyControlRequest] = {}
        self.max_new_tokens: dict[str, int] = {}
        self.plans: list[list[tuple[Any, ...]]] = [[] for _ in self.ranks]
        # The numbers of passes that find too little memory on the device.
        self.failing: set[int] = set()
        self.snapshots: dict[int, tuple[Any, ...]] = {}
        for index, rank in enumerate(self.ranks):
            self.record_plans(index, rank)

    def record_plans(self, index: int, rank: NullRank) -> None:
        launch = rank.runner.launch
        group: Any = CountingGroup()
        device: Any = SimpleNamespace(make_room=lambda num_bytes: True)
        room = PassRoom(device, group, 1, 1)
        rank.runner.forget_room = room.forget  # type: ignore[method-assign]

        def recorded(plan: BatchPlan, **fields: Any) -> Any:
            # A trial pass stands alone: it comes in its order, at every rank's own speed.
            is_trial = rank.scheduler.control.operations.stands_alone
            if len(self.plans[index]) in self.failing:
                rank.runner.faults.append(PassOutOfMemory(f"no memory on a rank: {BROKEN}"))
            num_asked = group.num_asked
            room.make(len(plan.input_ids_T), 0)
            asks = group.num_asked > num_asked
            self.plans[index].append((None if is_trial else self.num_turns(index), asks, *described(plan)))
            return launch(plan, **fields)

        rank.runner.launch = recorded  # type: ignore[method-assign]

    @rule(
        length=st.integers(1, 40),
        first=st.integers(1, 3),
        count=st.integers(0, 40),
        seed=st.integers(0, 5),
        contract=CONTRACTS,
    )
    def generate(self, length: int, first: int, count: int, seed: int, contract: VersionContract) -> None:
        count = min(count, 64 - length)
        rid = self.harness.generate(
            range(first, first + length), seed=seed, max_new_tokens=count, contract=contract, priority=seed
        )
        self.max_new_tokens[rid] = count
        self.go_on()

    @rule(number=st.integers(0, 20))
    def hang_up(self, number: int) -> None:
        """A client goes. Nothing holds this back, whatever is under way."""
        live = [rid for rid, output in self.harness.outputs.items() if output.finish is None]
        if live:
            self.harness.abort(live[number % len(live)])
            self.go_on()

    @rule(count=st.sampled_from([0, 0, 1, 2, 9]))
    def run_short_of_memory(self, count: int) -> None:
        """So many passes find none on the device, from now on, or after a wait."""
        self.harness.deliver(Expire(id=MEMORY_WAIT))
        first = max(map(len, self.plans))
        self.failing.update(range(first, first + count))
        self.go_on()

    @rule(num_tokens=st.integers(60, 170), preserve=st.sampled_from(list(Preserve)))
    def resize(self, num_tokens: int, preserve: Preserve) -> None:
        self.call(ResizeMemoryOccupationReqInput(num_tokens=num_tokens, preserve=preserve))

    @rule(request=st.sampled_from(SIMPLE))
    def ask_more(self, request: AnyControlRequest) -> None:
        self.call(request)

    @rule(number=st.integers(0, 20), is_session=st.booleans())
    def expire(self, number: int, is_session: bool) -> None:
        waiting = [
            call
            for call, request in self.calls.items()
            if call not in self.harness.replies and limit_s(request, 600.0) is not None
        ]
        if is_session:
            self.harness.deliver(Expire(id=f"weight-session-{number % 3}"))
        elif waiting:
            self.harness.deliver(Expire(id=waiting[number % len(waiting)]))

    @rule(count=st.sampled_from([1, 5, 40]))
    def turn_all(self, count: int) -> None:
        for _ in range(count):
            for index in range(len(self.ranks)):
                self.turn(index)

    def call(self, request: AnyControlRequest) -> None:
        self.calls[self.harness.call(request)] = request
        self.go_on()

    def go_on(self) -> None:
        count = self.random.choice([0, 5, 25, 100] if len(self.ranks) > 1 else [0, 0, 1, 8])
        for index in self.random.choices(range(len(self.ranks)), self.speeds, k=count):
            self.turn(index)

    def num_turns(self, index: int) -> int:
        return self.harness.num_turns(index) if len(self.ranks) > 1 else 0

    def turn(self, index: int) -> None:
        if len(self.ranks) == 1:
            self.turn_alone()
            return
        before = self.num_turns(index)
        self.harness.turn_rank(index)
        if (num_turns := self.num_turns(index)) > before:
            state = snapshot(self.ranks[index])
            assert self.snapshots.setdefault(num_turns, state) == state, f"rank {index} in turn {num_turns}"

    def turn_alone(self) -> None:
        """One turn of one rank. What a forward pass may run on, the null runner checks itself."""
        harness = self.harness
        state, weights = harness.state, dict(harness.weights.live)
        num_steps, num_waiting, known = harness.runner.num_steps, harness.num_waiting, set(harness.replies)
        was_working = harness.scheduler.control.operations.any_pending
        harness.turn()
        replies = [reply for call, reply in harness.replies.items() if call not in known]
        ran = harness.runner.num_steps > num_steps
        assert state is not None
        assert not ran or state.paused is None or replies, "a paused engine computed"
        is_refused = [isinstance(reply, Refusal) and reply.status < 500 for reply in replies]
        if not was_working and not ran and replies and all(is_refused) and len(replies) == num_waiting:
            assert (harness.state, harness.weights.live) == (state, weights), "a refusal changes nothing"

    @invariant()
    def forward_passes_are_the_same(self) -> None:
        longest = max(self.plans, key=len)
        assert all(plans == longest[: len(plans)] for plans in self.plans)

    @invariant()
    def pages_add_up(self) -> None:
        for rank in self.ranks:
            policy = rank.scheduler.policy
            all_kv = [req.kv for req in policy.running if req.kv]
            own, leased = list[int](), set[int]()
            for kv in all_kv:
                for pages, first in zip(kv.pages, kv.firsts, strict=True):
                    own += pages[max(first, len(kv.lease)) :]
                    leased |= {*pages[first : len(kv.lease)]}
            assert len(own) == len(set(own))
            num_cached = policy.cache.num_evictable_pages + len(leased)
            num_borrowed = policy.allocator.num_pages - policy.allocator.num_free - num_cached - len(own)
            # A canary's pass has a page of each group of layers.
            is_alone = rank.scheduler.control.operations.stands_alone
            assert num_borrowed == 0 or (is_alone and num_borrowed == policy.num_groups)
            assert policy.allocator.num_pages + policy.allocator.num_withdrawn == self.harness.num_pages

    @invariant()
    def parked_pages_add_up(self) -> None:
        for rank in self.ranks:
            if rank.scheduler.control.operations.stands_alone:
                continue  # It is about to be known what came of saving them.
            slots = set(rank.scheduler.control.memory._parked_slots)
            for req in rank.scheduler.policy.waiting:
                slots.update(*(*req.parked.slots, req.parked.state) if req.parked is not None else ())
            assert rank.page_store.num_bytes == len(slots)

    @invariant()
    def spans_are_contiguous(self) -> None:
        for output in self.harness.outputs.values():
            starts = [start for _, start in output.version_starts]
            assert starts == sorted(set(starts))
            assert bool(starts) == bool(output.token_ids)
            assert not starts or (starts[0] == 0 and starts[-1] < len(output.token_ids))

    @invariant()
    def reports_are_of_all_ranks_and_their_memory_adds_up(self) -> None:
        state = self.harness.state
        assert state is not None
        assert [report.tp_rank for report in state.ranks] == list(range(len(self.ranks)))
        if len(self.ranks) == 1:
            scheduler = self.harness.scheduler
            assert state.ranks[0].tags == scheduler.control.memory.report()
            assert (WAITS_FOR_MEMORY in state.reason) == scheduler._waits_for_memory
            resident = sum(report.resident_bytes for report in state.ranks[0].tags.values())
            assert self.harness.device.used_bytes == resident + self._given_back[0]

    def turn_until_idle(self) -> None:
        for _ in range(3000):
            # Some operations wait for what the loop is not told of: in the harness, every turn looks.
            operations = [rank.scheduler.control.operations for rank in self.ranks]
            if not self.harness.is_busy and not any(each.any_pending for each in operations):
                return
            self.turn_all(1)
        raise AssertionError("still busy")

    def teardown(self) -> None:
        """Everything that was accepted ends once all ranks are whole again and may run."""
        harness = self.harness
        self.make_whole()
        # Those that a rank has made already fail on the others too.
        self.failing = set(range(max(map(len, self.plans)))) & self.failing
        harness.deliver(Expire(id=MEMORY_WAIT))
        # What waits may begin a session, or become a pause, once it gets its turn: so more than once.
        for number in range(3):
            most = harness.scheduler.policy.tokens_of(harness.num_pages)
            self.call(ResizeMemoryOccupationReqInput(num_tokens=most))
            self.call_for_rest()
            self.call(updating(1, flush_cache=False, weight_version=1000 + number))
            self.call(ContinueGenerationReqInput())
            self.turn_until_idle()
        self.forward_passes_are_the_same()
        assert len({len(plans) for plans in self.plans}) == 1
        assert set(harness.replies) == set(self.calls), "every call has its one reply"
        for rid, output in harness.outputs.items():
            assert output.finish is not None, f"{rid} was lost"
            if output.finish.kind == "length":
                assert len(output.token_ids) == self.max_new_tokens[rid]
        refusals = [reply for reply in harness.replies.values() if isinstance(reply, Refusal)]
        failures = [reply.message for reply in refusals if reply.status == 500]
        assert all(BROKEN in message or "in time" in message for message in failures), failures
        if len(self.ranks) > 1:
            assert all("rank" in reply.message for reply in refusals if BROKEN in reply.message)
        for rank in self.ranks:
            memory, allocator = rank.scheduler.control.memory, rank.scheduler.policy.allocator
            assert (rank.chunks.lent, rank.chunks.num_spare, allocator.num_withdrawn) == (set(), 0, 0)
            assert all(value == 1 for value in rank.weights.live.values())
            resident = sum(report.resident_bytes for report in memory.report().values())
            assert rank.device.used_bytes == resident
            assert rank.page_store.num_bytes == 0
        harness.call(FlushCacheReqInput())
        self.turn_until_idle()
        assert harness.scheduler.policy.allocator.num_free == harness.num_pages


TestControlFuzz = fuzzed(ControlMachine, 50)
