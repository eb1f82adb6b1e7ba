"""Any order of requests: after every turn the invariants hold, and in the end every request has ended."""

from __future__ import annotations

import os
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ebbtide.srt.managers.io_struct import (
    AbortReq,
    AbortWeightUpdateReqInput,
    AnyControlRequest,
    BeginWeightUpdateReqInput,
    ContinueGenerationReqInput,
    EndWeightUpdateReqInput,
    Expire,
    FlushCacheReqInput,
    GetWeightsByNameReqInput,
    PauseGenerationReqInput,
    PauseMode,
    PingReqInput,
    Preserve,
    Refusal,
    ReleaseMemoryOccupationReqInput,
    ResizeMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightVersionReqInput,
)
from ebbtide.srt.memory_saver.tags import MemoryTag
from ebbtide.testing import SchedulerHarness, default_schedule

NUM_SEQUENCES = int(os.environ.get("EBBTIDE_FUZZ_SEQUENCES", "400"))
TAGS = st.lists(st.sampled_from(list(MemoryTag)), max_size=3).map(tuple)
NAMES = st.none() | st.lists(st.sampled_from([f"layer.{i}" for i in range(4)] + ["nope"]), max_size=4)


class ControlMachine(RuleBasedStateMachine):
    """Clients that know nothing of each other, against one scheduler."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, AnyControlRequest] = {}
        self.max_new_tokens: dict[str, int] = {}
        self.num_given_back = 0

    @initialize(overlap=st.booleans())
    def start(self, overlap: bool) -> None:
        schedule = default_schedule(max_running_requests=4, overlap=overlap)
        self.harness = SchedulerHarness(num_pages=24, context_len=64, schedule=schedule)

    @rule(
        length=st.integers(1, 40), first=st.integers(1, 3), count=st.integers(0, 20), seed=st.integers(0, 5)
    )
    def generate(self, length: int, first: int, count: int, seed: int) -> None:
        rid = self.harness.generate(range(first, first + length), seed=seed, max_new_tokens=count)
        self.max_new_tokens[rid] = count

    @rule(mode=st.sampled_from(list(PauseMode)), timeout_s=st.none() | st.sampled_from([-1.0, 1000.0]))
    def pause(self, mode: PauseMode, timeout_s: float | None) -> None:
        self.call(PauseGenerationReqInput(mode=mode, timeout_s=timeout_s))

    @rule()
    def proceed(self) -> None:
        self.call(ContinueGenerationReqInput())

    @rule(tags=TAGS, preserve=st.sampled_from(list(Preserve)))
    def release(self, tags: tuple[MemoryTag, ...], preserve: Preserve) -> None:
        self.call(ReleaseMemoryOccupationReqInput(tags=tags, preserve=preserve))

    @rule(tags=TAGS)
    def resume(self, tags: tuple[MemoryTag, ...]) -> None:
        self.call(ResumeMemoryOccupationReqInput(tags=tags))

    @rule(
        value=st.integers(1, 9),
        mode=st.none() | st.sampled_from(list(PauseMode)),
        flush_cache=st.booleans(),
        abort=st.booleans(),
        names=NAMES,
        fail_after=st.none() | st.integers(0, 3),
        staged=st.booleans(),
    )
    def update(
        self,
        value: int,
        mode: PauseMode | None,
        flush_cache: bool,
        abort: bool,
        names: list[str] | None,
        fail_after: int | None,
        staged: bool,
    ) -> None:
        self.harness.weights.num_staged = int(staged)
        manifest: dict[str, Any] = {"fail_after": fail_after}
        if names is not None:
            manifest["names"] = names
        self.call(
            UpdateWeightFromDiskReqInput(
                model_path=str(value),
                weight_version=value,
                pause_mode=mode,
                flush_cache=flush_cache,
                abort_all_requests=abort,
                manifest=manifest,
            )
        )

    @rule(
        which=st.sampled_from(["begin", "end", "end", "abort", "version"]),
        mode=st.none() | st.sampled_from(list(PauseMode)),
        flush_cache=st.none() | st.booleans(),
    )
    def session(self, which: str, mode: PauseMode | None, flush_cache: bool | None) -> None:
        requests: dict[str, AnyControlRequest] = {
            "begin": BeginWeightUpdateReqInput(timeout_s=1000.0),
            "end": EndWeightUpdateReqInput(
                pause_mode=mode, flush_cache=flush_cache, weight_version="e", allow_incomplete=mode is None
            ),
            "abort": AbortWeightUpdateReqInput(),
            "version": UpdateWeightVersionReqInput(new_version="v", abort_all_requests=bool(flush_cache)),
        }
        self.call(requests[which])

    @rule(number=st.integers(0, 3))
    def session_expires(self, number: int) -> None:
        self.harness.deliver(Expire(id=f"weight-session-{number}"))

    @rule(num_tokens=st.integers(60, 100))
    def resize(self, num_tokens: int) -> None:
        self.call(ResizeMemoryOccupationReqInput(num_tokens=num_tokens))

    @rule(timeout_s=st.sampled_from([0.0, 1000.0]))
    def flush(self, timeout_s: float) -> None:
        self.call(FlushCacheReqInput(timeout_s=timeout_s))

    @rule(index=st.integers(0, 10), abort_all=st.booleans())
    def abort(self, index: int, abort_all: bool) -> None:
        self.call(AbortReq(rid=f"req-{index}", abort_all=abort_all))

    @rule(request=st.sampled_from([PingReqInput(), GetWeightsByNameReqInput(name="layer.1")]))
    def ask(self, request: AnyControlRequest) -> None:
        self.call(request)

    @rule(index=st.integers(0, 20))
    def expire(self, index: int) -> None:
        waiting = [call for call in self.calls if call not in self.harness.replies]
        if waiting:
            self.harness.deliver(Expire(id=waiting[index % len(waiting)]))

    @rule(num_bytes=st.sampled_from([100, 3000, 8000]))
    def trainer_takes_memory(self, num_bytes: int) -> None:
        if num_bytes <= self.harness.device.free_bytes:
            self.harness.device.take(num_bytes)
            self.num_given_back += num_bytes

    @rule()
    def trainer_gives_memory_back(self) -> None:
        self.harness.device.used_bytes -= self.num_given_back
        self.num_given_back = 0

    @rule(count=st.integers(1, 12))
    def turn(self, count: int) -> None:
        for _ in range(count):
            self.turn_checked()

    def call(self, request: AnyControlRequest) -> None:
        self.calls[self.harness.call(request)] = request

    def turn_checked(self) -> None:
        """One turn. What a forward pass may run on, the null runner checks itself."""
        harness = self.harness
        state, weights = harness.state, dict(harness.weights.live)
        num_steps, num_waiting, known = harness.runner.num_steps, harness.num_waiting, set(harness.replies)
        was_working = harness.scheduler.control.operations.any_pending
        harness.turn()
        replies = [reply for call, reply in harness.replies.items() if call not in known]
        assert state is not None
        if state.paused is not None and not replies:
            assert harness.runner.num_steps == num_steps
        is_refused = [isinstance(reply, Refusal) and reply.status < 500 for reply in replies]
        ran = harness.runner.num_steps > num_steps
        if not was_working and not ran and replies and all(is_refused) and len(replies) == num_waiting:
            assert (harness.state, harness.weights.live) == (state, weights), "a refusal changes nothing"

    @invariant()
    def pages_add_up(self) -> None:
        policy = self.harness.scheduler.policy
        held = [
            page
            for req in policy.running
            if req.kv is not None
            for page in req.kv.pages[len(req.kv.lease.pages) :]
        ]
        assert len(held) == len(set(held))
        allocator = policy.allocator
        assert allocator.num_free + policy.cache.num_cached_pages + len(held) == allocator.num_pages
        assert allocator.num_pages + allocator.num_withdrawn == self.harness.num_pages

    @invariant()
    def device_memory_adds_up(self) -> None:
        state = self.harness.state
        assert state is not None
        resident = sum(report.resident_bytes for report in state.ranks[0].tags.values())
        assert self.harness.device.used_bytes == resident + self.num_given_back

    @invariant()
    def spans_are_contiguous(self) -> None:
        for output in self.harness.outputs.values():
            starts = [start for _, start in output.version_starts]
            assert starts == sorted(set(starts))
            assert bool(starts) == bool(output.token_ids)
            if starts:
                assert starts[0] == 0
                assert starts[-1] < len(output.token_ids)

    def teardown(self) -> None:
        """Everything that was accepted ends once the engine is whole again and may run."""
        harness = self.harness
        self.trainer_gives_memory_back()
        harness.weights.num_staged = 1
        # What waits may begin a session, or become a pause, once it gets its turn: so more than once.
        for _ in range(3):
            self.call(AbortWeightUpdateReqInput())
            self.call(ResumeMemoryOccupationReqInput())
            self.call(ResizeMemoryOccupationReqInput(num_tokens=4 * harness.num_pages))
            self.call(UpdateWeightFromDiskReqInput(model_path="1", flush_cache=False))
            self.call(ContinueGenerationReqInput())
            harness.run_until_idle()
        assert set(harness.replies) == set(self.calls), "every call has its one reply"
        for rid, output in harness.outputs.items():
            assert output.finish is not None, f"{rid} was lost"
            if output.finish.kind == "length":
                assert len(output.token_ids) == self.max_new_tokens[rid]
        failures = [
            reply for reply in harness.replies.values() if isinstance(reply, Refusal) and reply.status == 500
        ]
        assert all("told to fail" in reply.message for reply in failures), failures
        harness.call(FlushCacheReqInput())
        harness.turn(2)
        assert harness.scheduler.policy.allocator.num_free == harness.num_pages


ControlMachine.TestCase.settings = settings(
    max_examples=NUM_SEQUENCES,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestControlFuzz = ControlMachine.TestCase
