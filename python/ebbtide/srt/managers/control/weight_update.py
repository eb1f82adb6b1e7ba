"""Taking new weights: decode, check everything, stage, and commit between two forward passes.

Source: control_semantics section 2.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, nullcontext

from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.control.memory_occupation import MemoryOccupation, Valid
from ebbtide.srt.managers.control.pause import Generation, Paused
from ebbtide.srt.managers.control.ports import (
    DeadlinePassed,
    HandlerTable,
    IncomingWeights,
    Operation,
    Progress,
    Requests,
    Staging,
    Weights,
)
from ebbtide.srt.managers.io_struct import (
    AnyReply,
    GetWeightsByNameReqInput,
    GetWeightsByNameReqOutput,
    PauseMode,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromTensorReqInput,
    UpdateWeightsReqOutput,
    WeightUpdateRequest,
)
from ebbtide.srt.memory_saver.tags import MemoryTag

logger = logging.getLogger(__name__)

MAX_ERRORS = 20
# What is copied between two forward passes. Bytes, not milliseconds: ranks must cut alike.
SLICE_BYTES = 32 << 20


class Stall:
    """The longest time for which an update kept the loop from running a forward pass."""

    def __init__(self) -> None:
        self.longest_ms = 0.0

    @contextmanager
    def measure(self) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.longest_ms = max(self.longest_ms, (time.perf_counter() - started) * 1e3)


class WeightUpdates:
    """Updates of the weights, one at a time, the oldest first.

    Attributes:
        version: of the weights that serve.
        model_path, load_format: where the weights came from last, when that was a folder.
        timeout_s: for updates that bring no limit of their own.
    """

    def __init__(
        self,
        weights: Weights,
        memory: MemoryOccupation,
        generation: Generation,
        requests: Requests,
        *,
        version: str,
        model_path: str,
        load_format: str,
        timeout_s: float,
    ) -> None:
        self.version = version
        self.model_path = model_path
        self.load_format = load_format
        self.timeout_s = timeout_s
        self._weights = weights
        self._memory = memory
        self._content = memory.content
        self._generation = generation
        self._requests = requests
        self._turns: list[object] = []
        self.handlers: HandlerTable = {
            UpdateWeightFromDiskReqInput: self.update,
            UpdateWeightsFromTensorReqInput: self.update,
            GetWeightsByNameReqInput: self.read,
        }
        requests.serve_version(version)

    def update(self, request: WeightUpdateRequest) -> Operation:
        """Carry one update out. It ends with the new weights serving, or with a refusal and the old ones."""
        try:
            return (yield from self._update(request))
        except DeadlinePassed:
            raise RequestRejected(
                f"the update was given up at its deadline: {self._requests.num_running} requests were still "
                "running. Pause generation, or give pause_mode or a longer timeout_s"
            ) from None
        except RequestRejected:
            raise
        except Exception as error:
            if not isinstance(self._content.state, Valid):
                raise
            logger.error("a weight update failed; the old weights serve", exc_info=error)
            raise RequestRejected(
                f"the update failed, the old weights serve: {type(error).__name__}: {error}"
            ) from error

    def read(self, request: GetWeightsByNameReqInput) -> AnyReply:
        if request.truncate_size < 0:
            raise RequestRejected(f"truncate_size: expected 0 or more rows, got {request.truncate_size}")
        if request.name in self._weights.names:
            if MemoryTag.WEIGHTS in self._memory.released:
                raise RequestRejected("the weights are released: resume them first", 409)
            if request.name in self._content.missing:
                raise RequestRejected(
                    f"{request.name} is stale: it was not written since the weights were resumed", 409
                )
        return GetWeightsByNameReqOutput(values=self._weights.read(request.name, request.truncate_size))

    def _update(self, request: WeightUpdateRequest) -> Operation:
        self._check(request)
        stall = Stall()
        with closing(self._weights.open(request)) as incoming, self._turn() as has_come:
            _refuse_problems(incoming)
            while not has_come():
                yield Progress.WAITING
            self._check(request)
            with (
                self._generation.drain() if _own_mode(request) is PauseMode.WAIT else nullcontext(),
                closing(self._stage(incoming)) as staging,
            ):
                if staging.is_staged:
                    num_bytes = yield from self._fill(staging, incoming, stall)
                    yield from self._drained(request)
                    self._check(request)
                else:
                    yield from self._drained(request)
                    self._check(request)
                    # From here to the commit the weights are a mixture: no forward pass may see them.
                    self._content.lose(incoming.names)
                    num_bytes = yield from self._fill(staging, incoming, stall)
                with stall.measure():
                    num_paused = self._commit(request, incoming, staging)
        return self._reply(request, incoming, staging, num_bytes, stall, num_paused)

    def _check(self, request: WeightUpdateRequest) -> None:
        """Refuse what the state or the request itself rules out. Called again after every wait."""
        if request.selector == "draft":
            raise RequestRejected("selector 'draft': there is one model, expected 'target' or 'all'")
        if request.timeout_s is not None and request.timeout_s < 0:
            raise RequestRejected(f"timeout_s: expected 0 or more seconds, got {request.timeout_s}")
        if MemoryTag.WEIGHTS in self._memory.released:
            raise RequestRejected("the weights are released: resume_memory_occupation(['weights']) first")
        frees_kv = self._drains(request) or self._mode(request) in (PauseMode.RETRACT, PauseMode.ABORT)
        if request.flush_cache and self._requests.num_running > 0 and not frees_kv:
            raise RequestRejected(
                f"{self._requests.num_running} requests hold KV of the present weights: pause with mode "
                "retract or abort, or pass flush_cache=false"
            )

    def _mode(self, request: WeightUpdateRequest) -> PauseMode | None:
        """What the update itself does with running requests; None when a pause has seen to them."""
        if isinstance(self._generation.state, Paused):
            return None
        return _own_mode(request)

    def _drains(self, request: WeightUpdateRequest) -> bool:
        """Whether running requests get to their end first. They cannot where no forward pass can run."""
        return self._mode(request) is PauseMode.WAIT and self._memory.allows_forward

    def _stage(self, incoming: IncomingWeights) -> Staging:
        """A copy to write to; the live weights themselves where these hold nothing to keep."""
        is_whole = isinstance(self._content.state, Valid)
        return self._weights.stage(in_place=not is_whole or not incoming.names)

    def _drained(self, request: WeightUpdateRequest) -> Iterator[Progress]:
        while self._drains(request) and self._requests.num_running > 0:
            yield Progress.WAITING

    def _fill(
        self, staging: Staging, incoming: IncomingWeights, stall: Stall
    ) -> Generator[Progress, None, int]:
        """Write everything; returns the bytes that came in."""
        num_bytes = yield from _in_slices(incoming.write(staging), stall)
        if staging.is_staged:
            yield from _in_slices(staging.complete(incoming.names), stall)
        return num_bytes

    def _commit(self, request: WeightUpdateRequest, incoming: IncomingWeights, staging: Staging) -> int:
        """Weights, version and cache change together; returns how many requests were held up by it."""
        num_paused = self._requests.num_running
        mode = self._mode(request)
        if mode is not None:
            self._generation.stop_requests(mode, "a weight update")
        staging.commit()
        self._content.note_written(incoming.names)
        if request.weight_version is not None:
            self.version = str(request.weight_version)
            self._requests.serve_version(self.version)
        if isinstance(request, UpdateWeightFromDiskReqInput):
            self.model_path = request.model_path
            self.load_format = request.load_format or "auto"
        if request.flush_cache:
            self._requests.flush_cache()
        return num_paused

    def _reply(
        self,
        request: WeightUpdateRequest,
        incoming: IncomingWeights,
        staging: Staging,
        num_bytes: int,
        stall: Stall,
        num_paused: int,
    ) -> UpdateWeightsReqOutput:
        message = f"Updated {incoming.num_tensors} tensors."
        if request.weight_version is not None:
            message += f" Weight version updated to {self.version}."
        content = self._content.report()
        logger.info(
            "weights updated: version=%s tensors=%d bytes=%d staged=%s stall_ms=%.1f",
            self.version,
            incoming.num_tensors,
            num_bytes,
            staging.is_staged,
            stall.longest_ms,
        )
        return UpdateWeightsReqOutput(
            weight_version=self.version,
            committed=True,
            staged=staging.is_staged,
            num_tensors=incoming.num_tensors,
            num_ignored=incoming.num_ignored,
            num_bytes=num_bytes,
            stall_ms=stall.longest_ms,
            num_paused_requests=num_paused,
            content=content.content,
            num_missing=content.num_missing,
            message=message,
        )

    @contextmanager
    def _turn(self) -> Iterator[Callable[[], bool]]:
        """A place in the line of updates; the callable tells whether it has come to the front."""
        place = object()
        self._turns.append(place)
        try:
            yield lambda: self._turns[0] is place
        finally:
            self._turns.remove(place)


def _own_mode(request: WeightUpdateRequest) -> PauseMode:
    """What the request asks to do with running requests, if nobody has paused them."""
    if request.abort_all_requests:
        return PauseMode.ABORT
    return request.pause_mode if request.pause_mode is not None else PauseMode.WAIT


def _in_slices(writes: Iterator[int], stall: Stall) -> Generator[Progress, None, int]:
    """Work through `writes`, letting a forward pass in after every SLICE_BYTES; returns the bytes in all."""
    total_bytes = 0
    while True:
        slice_bytes = 0
        with stall.measure():
            for num_bytes in writes:
                slice_bytes += num_bytes
                if slice_bytes >= SLICE_BYTES:
                    break
            else:
                return total_bytes + slice_bytes
        total_bytes += slice_bytes
        yield Progress.WORKING


def _refuse_problems(incoming: IncomingWeights) -> None:
    problems = incoming.problems()
    if problems:
        listed = "; ".join(f"{problem['name']}: {problem['reason']}" for problem in problems[:MAX_ERRORS])
        raise RequestRejected(
            f"{len(problems)} of {incoming.num_tensors + incoming.num_ignored} tensors do not fit the model, "
            f"nothing was written: {listed}",
            errors=problems[:MAX_ERRORS],
            num_errors=len(problems),
        )
