"""What the control plane may do to the scheduler: stop and move live requests, and run trial passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.control import ParkingPlan
from ebbtide.srt.managers.control.adapters import AdapterVersion
from ebbtide.srt.managers.control.pace import Ranks, ending_rank
from ebbtide.srt.managers.io_struct import DetokenizerInput, FinishReason, InFlight, RetractCause
from ebbtide.srt.managers.scheduling.output_processor import OutputProcessor
from ebbtide.srt.managers.scheduling.request import Phase, Req
from ebbtide.srt.managers.scheduling.schedule_policy import SchedulePolicy
from ebbtide.srt.managers.scheduling.versions import Commit
from ebbtide.srt.managers.text.grammar import TOO_SLOW
from ebbtide.srt.managers.wire.channel import SendEnd
from ebbtide.srt.mem_cache.page_allocator import PageTable
from ebbtide.srt.model_executor.batch_plan import (
    BatchPlan,
    LogprobSpec,
    PassOutOfMemory,
    Runner,
    SampleSpec,
    StepResult,
)
from ebbtide.srt.sampling_params import SamplingParams

if TYPE_CHECKING:
    from ebbtide.srt.config import ScheduleConfig
    from ebbtide.srt.mem_cache.kv_scales import KVScales

WAITING: Final = "waiting-request"
RUNNING: Final = "running-request"
SLOW_MASKS: Final = "slow-masks"

# A rank that fails half-way must end: its requests could go on with KV that is not theirs.
_HALF_DONE: Final = ending_rank("what requests hold was changed by half")


@dataclass(eq=False)
class LiveRequests:
    """Implements `Requests` of the control plane. Aborted requests get a last output.

    Args:
        calibration: the scales of an FP8 KV cache that are calibrated while it serves; None: they are fixed.
    """

    _policy: SchedulePolicy
    _processor: OutputProcessor
    _outputs: SendEnd[DetokenizerInput]
    _calibration: KVScales | None = None

    def __post_init__(self) -> None:
        self.on_kv_given_up: Callable[[], None] = lambda: None

    def hold_admission(self, holds: bool) -> None:
        self._policy.holds_admission = holds

    @property
    def num_running(self) -> int:
        return len(self._policy.running)

    @property
    def num_begun(self) -> int:
        return self.num_running + len(self._policy.set_back)

    @property
    def num_queued(self) -> int:
        return len(self._policy.queued)

    @property
    def holds_pages(self) -> bool:
        return bool(self._policy.allocator.held)

    @_HALF_DONE
    def retract_all(self, cause: RetractCause) -> int:
        num_retracted = self._policy.retract_all(cause)
        self.on_kv_given_up()
        return num_retracted

    def plan_parking(self, max_pages: int, *, with_cache: bool) -> ParkingPlan:
        return self._policy.plan_parking(max_pages, with_cache=with_cache)

    @_HALF_DONE
    def park(self, plan: ParkingPlan) -> int:
        num_retracted = self._policy.park(plan)
        self._settle_if_empty()
        return num_retracted

    def abort_all(self, message: str) -> int:
        return self._finish(self._policy.live, FinishReason("abort", message=message))

    def abort(self, rids: Iterable[str], message: str) -> int:
        found = [req for rid in dict.fromkeys(rids) if (req := self._policy.find(rid)) is not None]
        return self._finish(found, FinishReason("abort", message=message))

    @_HALF_DONE
    def flush_cache(self) -> int:
        freed_tokens = self._policy.flush_cache()
        self._settle_if_empty()
        self.on_kv_given_up()
        return freed_tokens

    @_HALF_DONE
    def serve(self, version: str, *, is_update: bool = True) -> None:
        commit = Commit(self._policy.commit.number + 1, version)
        if is_update and self._calibration is not None:
            self._calibration.weights_changed()
        self._send_ended(self._policy.serve(commit, is_update=is_update))

    def moves_running(self, name: str, in_flight: InFlight) -> bool:
        return any(req.first_update is not None for req, _ in self._to_move(name, in_flight))

    @_HALF_DONE
    def move_to(self, version: AdapterVersion, in_flight: InFlight) -> int:
        to_move = list(self._to_move(version.name, in_flight))
        reason = FinishReason("abort", message="Aborted by a new version of its adapter (on_update)")
        num_ended = self._finish([req for req, how in to_move if how == "abort"], reason)
        for req, how in to_move:
            if how == "recompute":
                self._policy.give_up_kv(req)
            if how != "abort":
                self._move(req, version)
        self.on_kv_given_up()
        return len(to_move) - num_ended

    def _to_move(self, name: str, in_flight: InFlight) -> Iterator[tuple[Req, str]]:
        """The requests of an adapter that do not stay on their version, and what happens to each."""
        for req in self._policy.live:
            if req.adapter is None or req.adapter.name != name or "@" in (req.given.adapter or ""):
                continue
            own = req.given.contract.on_update
            how = in_flight if own == "continue" else own
            if req.first_update is None:
                how = "continue"
            if how in ("abort", "recompute", "continue"):
                yield req, how

    def _move(self, req: Req, version: AdapterVersion) -> None:
        """Let a request run on another version of its adapter, keeping its KV."""
        adapters, before = self._policy.adapters, req.adapter
        assert before is not None
        req.adapter = version
        adapters.join(version)
        if req.kv is not None:
            adapters.stop(before)
            adapters.start(version)
            req.kv.is_mixed = True
            self._policy.rows.set_adapter(req.kv.row, req)
        elif req.parked is not None:
            req.parked = replace(req.parked, is_mixed=True)
        adapters.leave(before)

    def end_on(self, version: AdapterVersion, message: str) -> None:
        ended = [req for req in self._policy.live if req.adapter is version]
        self._finish(ended, FinishReason("abort", message=message, status_code=500))

    @_HALF_DONE
    def _finish(self, requests: list[Req], reason: FinishReason) -> int:
        self._policy.finish(requests)
        self._send_ended([(req, reason) for req in requests])
        return len(requests)

    def _settle_if_empty(self) -> None:
        if self._calibration is not None and not self._policy.holds_kv:
            self._calibration.settle()

    def _send_ended(self, ended: list[tuple[Req, FinishReason]]) -> None:
        self.on_kv_given_up()
        if ended:
            self._outputs.send(self._processor.end(ended))


@dataclass(eq=False)
class TimeLimits:
    """Aborts requests that wait too long for their first step, run too long, or have too slow masks.

    Only the leader reads a clock. Every rank gets the limit as an `Expire` message, and decides by the state
    of the request, which is the same on all ranks.

    Args:
        set_deadline: (id, seconds); sends an `Expire` of this id after this time.
    """

    _config: ScheduleConfig
    _policy: SchedulePolicy
    _requests: LiveRequests
    _set_deadline: Callable[[str, float], None]

    def __post_init__(self) -> None:
        self._limits_s: dict[str, float | None] = {
            WAITING: self._config.waiting_timeout_s,
            RUNNING: self._config.running_timeout_s,
            SLOW_MASKS: 0.0,  # The caller of `note` has measured the time already.
        }

    def note(self, kind: str, arrival: int) -> None:
        """Note that the request with this arrival number is queued, runs, or has slow masks."""
        limit_s = self._limits_s[kind]
        if limit_s is not None:
            self._set_deadline(f"{kind}-{arrival}", limit_s)

    def expire(self, deadline_id: str) -> bool:
        """Abort the request whose limit this is, if it still applies. False: it is no limit of a request."""
        kind, _, arrival = deadline_id.rpartition("-")
        if kind not in self._limits_s:
            return False
        # By arrival, since another live request may have its rid by now.
        req = next((req for req in self._policy.live if str(req.arrival) == arrival), None)
        if req is None or (kind == WAITING and (req.phase is Phase.RUNNING or req.was_retracted)):
            return True
        limit_s, grammar = self._limits_s[kind], req.spec.params.grammar
        if kind == RUNNING:
            why = f"it has run {limit_s:g} s (SGLANG_REQ_RUNNING_TIMEOUT)"
        elif kind == WAITING:
            why = f"it has waited {limit_s:g} s (SGLANG_REQ_WAITING_TIMEOUT)"
        else:
            assert grammar is not None, "masks that are slow are a grammar's"
            why = f"sampling_params.{grammar.kind}: {TOO_SLOW}"
        self._requests.abort([req.rid], f"Aborted: {why}")
        return True


@dataclass
class SchedulerTrialPass:
    """A forward pass over tokens that belong to no request, between two passes of the scheduler.

    Implements `control.weights.TrialPass` with pages of the pool and the spare row of the page table.

    Args:
        kv_scales: scales that are calibrated; not by this pass, whose weights may never serve.
    """

    _policy: SchedulePolicy
    _table: PageTable
    _runner: Runner
    _ranks: Ranks
    _: KW_ONLY
    max_tokens: int
    vocab_size: int
    kv_scales: KVScales | None = None

    @contextmanager
    def room(self, num_tokens: int) -> Iterator[None]:
        num_pages = self._policy.pages_of(num_tokens)
        pages = self._policy.borrow_pages(num_pages)
        if pages is None:
            raise RequestRejected(
                f"canary: its forward pass needs {num_pages} pages of KV cache, and the pool has not so many"
            )
        entries = self._table.arrays[:, self._table.spare_row, : num_pages // len(self._table.arrays)]
        entries[:] = np.array(pages).reshape(entries.shape)
        try:
            yield
        finally:
            self._policy.allocator.free(pages)

    def logprobs(self, input_ids: Sequence[int], adapter_slot: int | None = None) -> list[float]:
        ids = list(input_ids)
        spec = SampleSpec(SamplingParams(max_new_tokens=0), 0, frozenset(), ids, [], LogprobSpec(start=0))
        plan = BatchPlan.of_prompt(spec, self._table.spare_row, adapter_slot)
        with self.kv_scales.paused() if self.kv_scales is not None else nullcontext():
            # A message that makes passes forget their room may come before this on one rank and after it on
            # another, so all of them forget it here, before and after the pass.
            self._runner.forget_room()
            # If one rank failed alone, the others would wait for it in the middle of the pass.
            result = self._ranks.certainly(lambda: self._launched(plan))
            self._runner.forget_room()
        if isinstance(result, PassOutOfMemory):
            raise result
        logprobs: list[float] = result.input_logprobs[0].tokens_N.tolist()
        return logprobs

    def _launched(self, plan: BatchPlan) -> StepResult | PassOutOfMemory:
        """The result. A lack of memory is returned, not raised: all ranks find it alike."""
        try:
            return self._runner.launch(plan).wait()
        except PassOutOfMemory as error:
            return error
