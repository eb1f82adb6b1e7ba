"""Pausing, continuing and aborting generation. Source: control_semantics section 1.1."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.control import (
    Activity,
    DeadlinePassed,
    HandlerTable,
    Operation,
    Requests,
)
from ebbtide.srt.managers.control.operations import Operations
from ebbtide.srt.managers.io_struct import (
    AbortReq,
    AbortReqOutput,
    AnyReply,
    ContinueGenerationReqInput,
    ContinueGenerationReqOutput,
    PauseGenerationReqInput,
    PauseGenerationReqOutput,
    PauseMode,
    RetractCause,
)

ESCALATION = list(PauseMode)
# The message of an aborted request.
_ABORTED = {
    RetractCause.PAUSE: "Aborted by pause_generation",
    RetractCause.UPDATE: "Aborted by a weight update",
}


@dataclass
class Generation:
    """The state machine of pauses; also drains, which hold back the admission of new requests.

    Attributes:
        paused: the mode of the pause, during which no forward pass runs; None: generation is not paused.
    """

    _requests: Requests
    _operations: Operations
    _num_drains: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.paused: PauseMode | None = None
        self.handlers: HandlerTable = {
            PauseGenerationReqInput: self.pause,
            ContinueGenerationReqInput: self.resume,
            AbortReq: self.abort,
        }

    def pause(self, request: PauseGenerationReqInput) -> AnyReply | Operation:
        if request.mode is PauseMode.WAIT:
            return self._pause_when_drained(request)
        self._operations.cancel(
            PauseGenerationReqInput,
            RequestRejected(f"superseded: a pause in mode {request.mode.value!r} came in between", 409),
        )
        before = self.paused
        if before is not None and ESCALATION.index(request.mode) < ESCALATION.index(before):
            return self._reply(before, changed=False)
        num_retracted, num_aborted = self.stop_requests(request.mode)
        self.paused = request.mode
        changed = self.paused != before or num_retracted > 0 or num_aborted > 0
        return self._reply(
            request.mode, changed=changed, num_retracted=num_retracted, num_aborted=num_aborted
        )

    def resume(self, request: ContinueGenerationReqInput) -> AnyReply:
        self._operations.cancel(
            PauseGenerationReqInput, RequestRejected("generation was continued in between", 409)
        )
        changed = self.paused is not None
        self.paused = None
        return ContinueGenerationReqOutput(
            changed=changed,
            message="Generation continues." if changed else "Generation was not paused.",
        )

    def abort(self, request: AbortReq) -> AnyReply:
        message = "Aborted by /abort_request"
        if request.abort_all:
            num_aborted = self._requests.abort_all(message)
        else:
            rids = [request.rid] if isinstance(request.rid, str) else request.rid
            num_aborted = self._requests.abort(rids, message)
        return AbortReqOutput(
            changed=num_aborted > 0, num_aborted=num_aborted, message=f"Aborted {num_aborted} requests."
        )

    def stop_requests(self, mode: PauseMode, cause: RetractCause = RetractCause.PAUSE) -> tuple[int, int]:
        """Do with live requests what this mode says; returns how many were retracted, and aborted."""
        match mode:
            case PauseMode.RETRACT:
                return self._requests.retract_all(cause), 0
            case PauseMode.ABORT:
                return 0, self._requests.abort_all(_ABORTED[cause])
            case _:
                return 0, 0

    @contextmanager
    def drain(self) -> Iterator[None]:
        """Within, admit no new request; running ones go on to their end."""
        self._num_drains += 1
        self._requests.hold_admission(True)
        try:
            yield
        finally:
            self._num_drains -= 1
            self._requests.hold_admission(self._num_drains > 0)

    def _pause_when_drained(self, request: PauseGenerationReqInput) -> Operation:
        with self.drain():
            try:
                while self.paused is None and self._requests.num_begun > 0:
                    yield Activity.WAITING
            except DeadlinePassed:
                left = self._requests.num_begun
                raise RequestRejected(
                    f"{left} requests were still running after {request.timeout_s:g} s; generation goes on. "
                    "Wait longer, or pause in mode in_place, retract or abort",
                    409,
                    num_running=left,
                ) from None
            yield Activity.BOUNDARY
        changed = self.paused is None
        if self.paused is None:
            self.paused = PauseMode.WAIT
        return self._reply(self.paused, changed=changed)

    def _reply(
        self, mode: PauseMode, *, changed: bool, num_retracted: int = 0, num_aborted: int = 0
    ) -> PauseGenerationReqOutput:
        return PauseGenerationReqOutput(
            changed=changed,
            mode=mode,
            num_running=self._requests.num_running,
            num_retracted=num_retracted,
            num_aborted=num_aborted,
            num_queued=self._requests.num_queued,
            message=f"Generation is paused ({mode.value}).",
        )
