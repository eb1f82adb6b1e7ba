"""Resizing the KV cache while it serves, and emptying the prefix cache.

Source: control_semantics sections 1.2 (`resize`) and 3.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeVar

from ebbtide.srt.errors import EngineError, OutOfDeviceMemory, RequestRejected
from ebbtide.srt.managers.control import (
    Activity,
    DeadlinePassed,
    HandlerTable,
    KVMemory,
    Operation,
    Requests,
    ShrinkingPlan,
    Work,
)
from ebbtide.srt.managers.control.memory_occupation import MemoryOccupation
from ebbtide.srt.managers.control.operations import wait_until
from ebbtide.srt.managers.control.pace import Ranks, at_once
from ebbtide.srt.managers.io_struct import (
    AnyReply,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    ResizeMemoryOccupationReqInput,
    ResizeMemoryOccupationReqOutput,
    RetractCause,
)

T = TypeVar("T")

# Bytes mapped or unmapped between two forward passes while requests run: 3 to 5 ms of the driver's time.
PART_BYTES: Final = 6 << 30
NOT_IN_TIME: Final = "not all ranks did their part in time. Nothing was changed"


@dataclass
class KVSize:
    """Resizes the KV cache."""

    _pool: KVMemory
    _memory: MemoryOccupation
    _requests: Requests
    _free_bytes: Callable[[], int]
    _ranks: Ranks
    _is_busy: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.handlers: HandlerTable = {ResizeMemoryOccupationReqInput: self.resize}

    def resize(self, request: ResizeMemoryOccupationReqInput) -> Operation:
        started = time.perf_counter()
        if (request.num_tokens is None) == (request.num_bytes is None):
            raise RequestRejected("expected either num_tokens or num_bytes", 400)
        yield from wait_until(
            lambda: not (self._memory.is_kv_partial or self._is_busy),
            "kv_cache is still being resumed or resized",
        )
        self._is_busy = True
        try:
            yield Activity.BOUNDARY
            return (yield from self._resize_alone(request, started))
        finally:
            self._is_busy = False

    def _resize_alone(self, request: ResizeMemoryOccupationReqInput, started: float) -> Operation:
        if self._memory.is_kv_released:
            raise RequestRejected("kv_cache is released: resume it first", 409)
        free_before = self._free_bytes()
        num_added = self._pool.choose(request.num_tokens, request.num_bytes)
        num_parked, num_retracted, parked_bytes, moved_bytes = 0, 0, 0, 0
        if num_added < 0:
            plan = self._pool.plan(-num_added, request.preserve)
            num_parked, num_retracted = len(plan.parked), len(plan.retracted)
            parked_bytes = yield from self._save(plan)
            self._ranks.certainly(lambda: self._pool.withdraw(plan))
            moved_bytes = -(yield from self._give(-num_added))
        elif num_added > 0:
            moved_bytes = yield from self._or_undone(self._add(num_added), self._pool.unadd)
            self._pool.restore()
        return ResizeMemoryOccupationReqOutput(
            changed=num_added != 0,
            num_tokens=self._pool.num_tokens,
            num_bytes=self._pool.num_bytes,
            chunk_tokens=self._pool.chunk_tokens,
            chunk_bytes=self._pool.chunk_bytes,
            moved_bytes=moved_bytes,
            num_retracted=num_retracted,
            num_parked=num_parked,
            parked_bytes=parked_bytes,
            device_free_bytes_before=free_before,
            device_free_bytes_after=self._free_bytes(),
            duration_ms=(time.perf_counter() - started) * 1e3,
            message="The KV cache was resized." if num_added else "The KV cache has this size already.",
        )

    def _save(self, plan: ShrinkingPlan) -> Work[int]:
        """Copy the KV of the parked requests to the host, on all ranks; returns the bytes."""
        if not plan.parked:
            return 0
        saving = self._take(lambda: self._pool.save(plan), "no room to keep the KV of running requests")
        return (yield from self._or_undone(saving, self._pool.discard))

    def _take(self, act: Callable[[], int], problem: str) -> Work[int]:
        """Do this on all ranks at once. A lack of memory is refused; `problem` is how the message begins."""

        def attempt() -> int:
            try:
                return act()
            except OutOfDeviceMemory as error:
                raise error.refusal(f"{problem}: {error}. Nothing was changed") from error

        return self._ranks.phase(Activity.ALONE, at_once(attempt))

    def _or_undone(self, work: Work[T], undo: Callable[[], None]) -> Work[T]:
        """Do the work of all ranks. If one of them fails or is late, undo it on this rank."""
        try:
            return (yield from work)
        except (DeadlinePassed, RequestRejected, EngineError) as error:
            self._ranks.certainly(undo)
            if isinstance(error, DeadlinePassed):
                raise RequestRejected(NOT_IN_TIME, 409) from None
            raise

    def _give(self, num_chunks: int) -> Work[int]:
        moved_bytes = 0
        while True:
            part = self._part_of(num_chunks)
            num_chunks -= part
            moved_bytes += self._ranks.certainly(partial(self._pool.remove, part))
            if num_chunks == 0:
                return moved_bytes
            yield from self._let_pass_run()

    def _add(self, num_chunks: int) -> Work[int]:
        """Take memory for these chunks, on all ranks or on none; returns the bytes."""
        moved_bytes = 0
        while True:
            part = self._part_of(num_chunks)
            num_chunks -= part
            moved_bytes += yield from self._take(
                partial(self._pool.add, part), "no memory for a larger KV cache"
            )
            if num_chunks == 0:
                return moved_bytes
            yield from self._let_pass_run()
            if self._memory.is_kv_released:
                raise RequestRejected("kv_cache was released as it grew. Nothing was changed", 409)

    def _part_of(self, num_chunks: int) -> int:
        if self._requests.num_running == 0:
            return num_chunks
        return min(num_chunks, max(1, PART_BYTES // self._pool.chunk_bytes))

    def _let_pass_run(self) -> Work[None]:
        """Let a forward pass run. A deadline that passes meanwhile does not end the resize half-way."""
        with suppress(DeadlinePassed):
            yield Activity.WORKING


@dataclass
class CacheFlush:
    """Empties the prefix cache: at once what no request uses; the rest if the request waits for it."""

    _requests: Requests

    def __post_init__(self) -> None:
        self.handlers: HandlerTable = {FlushCacheReqInput: self.flush}

    def flush(self, request: FlushCacheReqInput) -> AnyReply | Operation:
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
