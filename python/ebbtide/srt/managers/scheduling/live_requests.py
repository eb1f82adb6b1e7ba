"""The live generation requests as the control plane handles them: all at once, or by id."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from ebbtide.srt.managers.control.ports import ParkingPlan
from ebbtide.srt.managers.io_struct import DetokenizerInput, FinishReason, RetractCause
from ebbtide.srt.managers.scheduling.output_processor import OutputProcessor
from ebbtide.srt.managers.scheduling.request import Req
from ebbtide.srt.managers.scheduling.schedule_policy import SchedulePolicy
from ebbtide.srt.managers.scheduling.versions import Commit
from ebbtide.srt.managers.wire.channel import SendEnd


class Calibration(Protocol):
    """How the KV cache stores numbers, where that follows what was seen of them; `KVScales` is one."""

    def settle(self) -> bool:
        """The pool holds nothing: numbers may be stored otherwise from now on."""
        ...

    def weights_changed(self) -> None:
        """What was seen was computed by other weights."""
        ...


class LiveRequests:
    """Implements `control.ports.Requests` over the policy; aborted requests get their last output.

    Args:
        calibration: None where numbers are stored in one way for good.
    """

    def __init__(
        self,
        policy: SchedulePolicy,
        processor: OutputProcessor,
        outputs: SendEnd[DetokenizerInput],
        calibration: Calibration | None = None,
    ) -> None:
        self._policy = policy
        self._calibration = calibration
        self._processor = processor
        self._outputs = outputs
        self.on_kv_given_up: Callable[[], None] = lambda: None

    @property
    def holds_admission(self) -> bool:
        return self._policy.holds_admission

    @holds_admission.setter
    def holds_admission(self, value: bool) -> None:
        self._policy.holds_admission = value

    @property
    def num_running(self) -> int:
        return len(self._policy.running)

    @property
    def num_queued(self) -> int:
        return len(self._policy.queued)

    @property
    def holds_pages(self) -> bool:
        return bool(self._policy.allocator.held)

    def retract_all(self, cause: RetractCause) -> int:
        num_retracted = self._policy.retract_all(cause)
        self.on_kv_given_up()
        return num_retracted

    def plan_parking(self, max_pages: int, *, with_cache: bool) -> ParkingPlan:
        return self._policy.plan_parking(max_pages, with_cache=with_cache)

    def park(self, plan: ParkingPlan) -> int:
        num_retracted = self._policy.park(plan)
        self._settle_if_empty()
        return num_retracted

    def abort_all(self, message: str) -> int:
        ended = self._policy.finish_all()
        self.on_kv_given_up()
        return self._send_aborted(ended, message)

    def abort(self, rids: Iterable[str], message: str) -> int:
        found = [req for rid in dict.fromkeys(rids) if (req := self._policy.find(rid)) is not None]
        for req in found:
            self._policy.finish(req)
        self.on_kv_given_up()
        return self._send_aborted(found, message)

    def flush_cache(self) -> int:
        freed_tokens = self._policy.flush_cache()
        self._settle_if_empty()
        self.on_kv_given_up()
        return freed_tokens

    def serve(self, version: str, *, is_update: bool = True) -> None:
        commit = Commit(self._policy.commit.number + 1, version)
        if is_update and self._calibration is not None:
            self._calibration.weights_changed()
        ended = self._policy.serve(commit, is_update=is_update)
        self.on_kv_given_up()
        self._send_ended(ended)

    def _settle_if_empty(self) -> None:
        if self._calibration is not None and not self._policy.holds_kv:
            self._calibration.settle()

    def _send_aborted(self, requests: list[Req], message: str) -> int:
        reason = FinishReason("abort", message=message)
        self._send_ended([(req, reason) for req in requests])
        return len(requests)

    def _send_ended(self, ended: list[tuple[Req, FinishReason]]) -> None:
        output = self._processor.end(ended)
        if output is not None:
            self._outputs.send(output)
