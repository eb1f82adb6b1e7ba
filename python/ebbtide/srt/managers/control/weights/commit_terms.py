"""What an update asks for, what that takes of the engine's state, and what it is answered.

Source: control_semantics section 2.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeGuard

from msgspec import structs

from ebbtide.srt.errors import EngineError, RequestRejected, first_few
from ebbtide.srt.managers.control import (
    Activity,
    DeadlinePassed,
    Operation,
    OutOfStep,
    Overruled,
    Requests,
    Work,
)
from ebbtide.srt.managers.control.memory_occupation import MemoryOccupation
from ebbtide.srt.managers.control.operations import Stages, described
from ebbtide.srt.managers.control.pause import Generation
from ebbtide.srt.managers.io_struct import (
    Canary,
    PauseMode,
    PiecewiseRequest,
    RetractCause,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsReqOutput,
    WeightUpdateRequest,
)
from ebbtide.srt.managers.wire.weight_requests import STATE_DICTS

logger = logging.getLogger(__name__)

# How many names, or refusals, the fields of an answer list at most.
MAX_LISTED: Final = 10


@dataclass(frozen=True)
class CommitTerms:
    """What an update, or the end of a session, asks for.

    Attributes:
        mode: what becomes of running requests if nobody has paused them.
        version: None keeps the one that serves.
        canary: what the new weights are tried with first.
        refuses_nonfinite: an update that holds NaN or Inf is refused.
        folder: (model_path, load_format) where the weights come from a folder.
    """

    mode: PauseMode
    flush_cache: bool
    version: str | None
    canary: Canary | None
    refuses_nonfinite: bool
    folder: tuple[str, str] | None


class Counts(NamedTuple):
    num_tensors: int = 0
    num_ignored: int = 0
    num_bytes: int = 0


class RefusedUpdates:
    """Updates of a session that were refused, until others have written all that these were to write."""

    def __init__(self) -> None:
        # Why, and what nobody has written since; None: not even its names could be read.
        self._left: list[tuple[str, frozenset[str] | None]] = []

    def add(self, reason: str, names: frozenset[str] | None) -> None:
        """Count one as refused that was to write these names; None: nobody knows which."""
        self._left.append((reason, names))
        self.make_up(frozenset())

    def make_up(self, names: frozenset[str]) -> None:
        """Take these names as written."""
        left = [(reason, None if wanted is None else wanted - names) for reason, wanted in self._left]
        self._left = [refused for refused in left if refused[1] != frozenset()]

    def require_none(self) -> None:
        """Refuse to commit half of what was sent."""
        if not self._left:
            return
        reasons = [reason for reason, _ in self._left]
        can_be_sent_again = all(names is not None for _, names in self._left)
        remedy = "Send it, or" if can_be_sent_again else "Not all of their names could be read:"
        raise RequestRejected(
            f"the session is incomplete: refused were {len(reasons)} of its updates, and what they were to "
            f"write was not sent again: {first_few(reasons, '; ')}. "
            f"{remedy} abort_weight_update; allow_incomplete commits what there is",
            409,
            refusals=[
                {"message": reason, "names": None if names is None else sorted(names)[:MAX_LISTED]}
                for reason, names in self._left[:MAX_LISTED]
            ],
            num_refusals=len(reasons),
        )


def is_piecewise(request: WeightUpdateRequest) -> TypeGuard[PiecewiseRequest]:
    """Whether its tensors come piece by piece, from senders that wait for answers or broadcast on."""
    if isinstance(request, UpdateWeightsFromDistributedReqInput):
        return request.load_format == STATE_DICTS
    return isinstance(request, UpdateWeightsFromIPCReqInput)


def announced_names(request: WeightUpdateRequest) -> frozenset[str] | None:
    """What a request says that it is to write, whether that can be had or not."""
    if not isinstance(request, UpdateWeightsFromDistributedReqInput) or is_piecewise(request):
        return None
    names = request.names if request.name is None else [request.name]
    return None if names is None else frozenset(names)


def require_base(base_version: str | None, serving: str, pending: str | None) -> None:
    """Refuse a delta of other weights than those that it would change.

    Args:
        base_version: of which it is; None: it does not say.
        pending: the version that the open session has come to; None: nobody has named one.
    """
    if base_version is None or base_version == (serving if pending is None else pending):
        return
    state = f"{serving!r} serves" if pending is None else f"the session has come to {pending!r}"
    raise RequestRejected(
        f"base_version: the delta is of version {base_version[:200]!r}, and {state}: send a delta of that, "
        "or the weights whole",
        409,
        weight_version=serving,
    )


@dataclass
class CommitConditions:
    """The terms of a commit, against generation and memory as they are."""

    _generation: Generation
    _memory: MemoryOccupation
    _requests: Requests

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
        return self._generation.paused is not None or self._requests.num_running == 0

    def draining(self, terms: CommitTerms) -> AbstractContextManager[None]:
        """Within, nothing is admitted, if running requests are to end first."""
        return self._generation.drain() if terms.mode is PauseMode.WAIT else nullcontext()

    def ready(self, terms: CommitTerms) -> Iterator[Activity]:
        """Wait for running requests, if they are to end first; then look again.

        That is at a boundary only where the pass under way may bring a refusal to its end: behind it fewer
        requests may run, and not more.
        """
        while self._waits(terms) and self._requests.num_begun > 0:
            yield Activity.DRAINING
        try:
            self.check(terms)
        except RequestRejected:
            yield Activity.BOUNDARY
            self.check(terms)

    def mode(self, terms: CommitTerms) -> PauseMode | None:
        """What is to become of running requests; None where they are paused, and it is not ours to say."""
        return None if self._generation.paused is not None else terms.mode

    def stop_requests(self, terms: CommitTerms, mode: PauseMode | None) -> None:
        """Have requests out of the way of a commit.

        Args:
            mode: as it was when the commit was agreed to. While other replicas were waited for, a pause may
                have begun or ended: then requests may hold KV against the terms, and are retracted.
        """
        if mode is not None:
            self._generation.stop_requests(mode, RetractCause.UPDATE)
        if terms.flush_cache and self._requests.num_running > 0:
            self._generation.stop_requests(PauseMode.RETRACT, RetractCause.UPDATE)

    def guarded(self, make: Callable[[Stages], Work[UpdateWeightsReqOutput]]) -> Operation:
        """Say of every failure what serves now, and in the reply what the time was for."""
        was_valid, stages = self._memory.content.is_valid, Stages()
        try:
            reply = yield from make(stages)
        except Overruled as overruled:
            num_missing = len(self._memory.content.missing)
            if num_missing == 0:
                raise
            left = f"{num_missing} parameters are stale: send the update again"
            raise Overruled(overruled.message, 500 if was_valid else 400, left) from None
        except (RequestRejected, OutOfStep):
            raise
        except DeadlinePassed:
            advice = "give a longer timeout_s"
            if num_running := self._requests.num_begun:
                advice = (
                    f"{num_running} requests were still running. Pause generation, or give pause_mode or a "
                    "longer timeout_s"
                )
            raise RequestRejected(f"the update was given up at its deadline: {advice}") from None
        except Exception as error:
            if stages.is_committed:
                raise EngineError(
                    f"the new weights serve; what was left to be done failed: {described(error)}"
                ) from error
            if not self._memory.content.is_valid:
                num_missing = len(self._memory.content.missing)
                raise EngineError(
                    f"{described(error)}. No request runs: {num_missing} parameters are stale until an "
                    "update writes them"
                ) from error
            logger.error("a weight update failed; the old weights serve", exc_info=error)
            raise RequestRejected(f"the update failed, the old weights serve: {described(error)}") from error
        stages.end("release" if reply.committed else "stage")
        return structs.replace(reply, stages_ms=stages.took_ms)

    def _waits(self, terms: CommitTerms) -> bool:
        """Whether running requests get to their end first. They cannot where no forward pass can run."""
        return self.mode(terms) is PauseMode.WAIT and self._memory.allows_forward


def describe_nonfinite(nonfinite: Collection[str]) -> str:
    """Which tensors hold NaN or Inf, as a sentence."""
    return f"{len(nonfinite)} tensors hold NaN or Inf: {first_few(sorted(nonfinite))}."
