"""Emptying the prefix cache. Source: control_semantics section 3."""

from __future__ import annotations

from ebbtide.srt.managers.control.operations import require_timeout
from ebbtide.srt.managers.control.ports import (
    Activity,
    DeadlinePassed,
    HandlerTable,
    Operation,
    Requests,
)
from ebbtide.srt.managers.io_struct import AnyReply, FlushCacheReqInput, FlushCacheReqOutput, RetractCause


class CacheFlush:
    """Flushes at once what nobody uses, and on request waits for the rest."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self.handlers: HandlerTable = {FlushCacheReqInput: self.flush}

    def flush(self, request: FlushCacheReqInput) -> AnyReply | Operation:
        require_timeout(request.timeout_s)
        if request.retract_running:
            self._requests.retract_all(RetractCause.FLUSH)
        if self._requests.num_running == 0 or request.timeout_s == 0:
            return self._flushed(self._requests.flush_cache())
        return self._flush_when_idle()

    def _flush_when_idle(self) -> Operation:
        freed_tokens = self._requests.flush_cache()
        try:
            while self._requests.num_running > 0:
                yield Activity.WAITING
        except DeadlinePassed:
            pass
        yield Activity.BOUNDARY
        return self._flushed(freed_tokens + self._requests.flush_cache())

    def _flushed(self, freed_tokens: int) -> FlushCacheReqOutput:
        num_running = self._requests.num_running
        message = "The prefix cache is empty."
        if num_running:
            message = f"{num_running} requests still hold KV: what they use stays in the prefix cache."
        return FlushCacheReqOutput(
            success=num_running == 0,
            fully_flushed=num_running == 0,
            freed_tokens=freed_tokens,
            message=message,
        )
