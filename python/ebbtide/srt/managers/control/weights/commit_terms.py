"""On what terms an update is committed, and what these ask of the engine's state."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.control.memory_occupation import MemoryOccupation
from ebbtide.srt.managers.control.pause import Generation, Paused
from ebbtide.srt.managers.control.ports import (
    Activity,
    DeadlinePassed,
    Operation,
    OutOfStep,
    Overruled,
    Requests,
)
from ebbtide.srt.managers.control.weight_content import Valid
from ebbtide.srt.managers.io_struct import (
    BeginWeightUpdateReqInput,
    Canary,
    EndWeightUpdateReqInput,
    PauseMode,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
    WeightUpdateRequest,
)

logger = logging.getLogger(__name__)

CAUSE = "a weight update"


@dataclass(frozen=True)
class CommitTerms:
    """On what terms a session is committed.

    Attributes:
        mode: what becomes of running requests if nobody has paused them.
        version: None keeps the one that serves.
        canary: what the new weights are tried with first.
    """

    mode: PauseMode
    flush_cache: bool
    version: str | None
    canary: Canary | None = None


def check_fields(
    request: WeightUpdateRequest | BeginWeightUpdateReqInput | EndWeightUpdateReqInput,
) -> None:
    """Refuse values that no state allows."""
    if not isinstance(request, EndWeightUpdateReqInput) and request.selector == "draft":
        raise RequestRejected("selector 'draft': there is one model, expected 'target' or 'all'")
    if request.timeout_s is not None and not request.timeout_s >= 0:
        raise RequestRejected(f"timeout_s: expected 0 or more seconds, got {request.timeout_s}")


def mode_of(request: WeightUpdateRequest | EndWeightUpdateReqInput) -> PauseMode:
    """What the request asks to do with running requests, if nobody has paused them."""
    if isinstance(request, WeightUpdateRequest) and request.abort_all_requests:
        return PauseMode.ABORT
    return request.pause_mode if request.pause_mode is not None else PauseMode.WAIT


def version_of(request: WeightUpdateRequest | EndWeightUpdateReqInput) -> str | None:
    """The version that it gives the weights; None leaves it as it is."""
    return None if request.weight_version is None else str(request.weight_version)


def announced_names(request: WeightUpdateRequest) -> frozenset[str] | None:
    """What a request says that it is to write, whether that can be had or not."""
    if not isinstance(request, UpdateWeightsFromDistributedReqInput):
        return None
    names = request.names if request.name is None else [request.name]
    return None if names is None else frozenset(names)


def folder_of(request: WeightUpdateRequest) -> tuple[str, str] | None:
    """(model_path, load_format) where the weights come from a folder."""
    if isinstance(request, UpdateWeightFromDiskReqInput):
        return request.model_path, request.load_format or "auto"
    return None


def require_base(base_version: str | None, serving: str, pending: str | None) -> None:
    """Refuse a delta of other weights than those that it would change.

    Args:
        base_version: of which it is; None: it does not say.
        pending: the version that the open session is to make serve.
    """
    if base_version is not None and base_version not in (serving, pending):
        raise RequestRejected(
            f"base_version: the delta is of version {base_version[:200]!r}, and {serving!r} serves: send a "
            "delta of that, or the weights whole",
            409,
            weight_version=serving,
        )


class CommitConditions:
    """The terms of a commit, against generation and memory as they are."""

    def __init__(self, generation: Generation, memory: MemoryOccupation, requests: Requests) -> None:
        self._generation = generation
        self._memory = memory
        self._requests = requests

    def check(self, terms: CommitTerms) -> None:
        """Refuse a commit that would leave requests with KV that it is to flush. Parked ones lose theirs."""
        frees_kv = self.mode(terms) in (PauseMode.RETRACT, PauseMode.ABORT) or self._memory.is_kv_released
        if terms.flush_cache and self._requests.num_running > 0 and not frees_kv and not self._waits(terms):
            raise RequestRejected(
                f"{self._requests.num_running} requests hold KV of the present weights: pause with mode "
                "retract or abort, or pass flush_cache=false"
            )

    @property
    def nobody_waits(self) -> bool:
        """Whether a commit holds no forward pass up, however long it takes."""
        return isinstance(self._generation.state, Paused) or self._requests.num_running == 0

    def draining(self, terms: CommitTerms) -> AbstractContextManager[None]:
        """Within, nothing is admitted, if running requests are to end first."""
        return self._generation.drain() if terms.mode is PauseMode.WAIT else nullcontext()

    def ready(self, terms: CommitTerms) -> Iterator[Activity]:
        """Wait for running requests, if they are to end first; then, at a boundary, look again."""
        while self._waits(terms) and self._requests.num_running > 0:
            yield Activity.DRAINING
        yield Activity.BOUNDARY
        self.check(terms)

    def mode(self, terms: CommitTerms) -> PauseMode | None:
        """What is to become of running requests; None where they are paused, and it is not ours to say."""
        return None if isinstance(self._generation.state, Paused) else terms.mode

    def stop_requests(self, terms: CommitTerms, mode: PauseMode | None) -> None:
        """Have requests out of the way of a commit.

        Args:
            mode: as it was when the commit was agreed to. While other replicas were waited for, a pause may
                have begun or ended: then requests may hold KV against the terms, and are retracted.
        """
        if mode is not None:
            self._generation.stop_requests(mode, CAUSE)
        if terms.flush_cache and self._requests.num_running > 0:
            self._generation.stop_requests(PauseMode.RETRACT, CAUSE)

    def guarded(self, operation: Operation) -> Operation:
        """Say of every failure what serves now."""
        was_valid = isinstance(self._memory.content.state, Valid)
        try:
            return (yield from operation)
        except Overruled as overruled:
            num_missing = len(self._memory.content.missing)
            if num_missing == 0:
                raise
            left = f"{num_missing} parameters are stale: send the update again"
            raise Overruled(overruled.message, 500 if was_valid else 400, left) from None
        except (RequestRejected, OutOfStep):
            raise
        except DeadlinePassed:
            raise RequestRejected(
                f"the update was given up at its deadline: {self._requests.num_running} requests were still "
                "running. Pause generation, or give pause_mode or a longer timeout_s"
            ) from None
        except Exception as error:
            if not isinstance(self._memory.content.state, Valid):
                raise
            logger.error("a weight update failed; the old weights serve", exc_info=error)
            raise RequestRejected(
                f"the update failed, the old weights serve: {type(error).__name__}: {error}"
            ) from error

    def _waits(self, terms: CommitTerms) -> bool:
        """Whether running requests get to their end first. They cannot where no forward pass can run."""
        return self.mode(terms) is PauseMode.WAIT and self._memory.allows_forward
