"""The terms of a commit, whether the engine's state allows them, and how failures are answered.

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

# The most names, or refusals, that a field of an answer lists.
MAX_LISTED: Final = 10


@dataclass(frozen=True)
class CommitTerms:
    """What an update, or the end of a session, asks for.

    Attributes:
        mode: what happens to running requests, unless generation is paused.
        flush_cache: whether the prefix cache is emptied.
        version: of the new weights; None: the version stays.
        canary: the trial pass before the commit; None: there is none.
        refuses_nonfinite: whether an update with NaN or Inf is refused.
        folder: (model_path, load_format) of weights from a folder; else None.
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
    """The refused updates of a session whose tensors have not been sent again."""

    def __init__(self) -> None:
        # The reason of each, and the names that are still missing; None: its names could not be read.
        self._left: list[tuple[str, frozenset[str] | None]] = []

    def add(self, reason: str, names: frozenset[str] | None) -> None:
        """Note a refused update of these names; None: its names are not known."""
        self._left.append((reason, names))
        self.make_up(frozenset())

    def make_up(self, names: frozenset[str]) -> None:
        """Note that these names were written after all."""
        left = [(reason, None if wanted is None else wanted - names) for reason, wanted in self._left]
        self._left = [refused for refused in left if refused[1] != frozenset()]

    def require_none(self) -> None:
        """Refuse a commit while tensors of a refused update are missing."""
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
    """Whether the tensors come piece by piece, from senders that wait for answers or broadcast in a row."""
    if isinstance(request, UpdateWeightsFromDistributedReqInput):
        return request.load_format == STATE_DICTS
    return isinstance(request, UpdateWeightsFromIPCReqInput)


def announced_names(request: WeightUpdateRequest) -> frozenset[str] | None:
    """The names that a request announces before anything is received; None: it announces none."""
    if not isinstance(request, UpdateWeightsFromDistributedReqInput) or is_piecewise(request):
        return None
    names = request.names if request.name is None else [request.name]
    return None if names is None else frozenset(names)


def require_base(base_version: str | None, serving: str, pending: str | None) -> None:
    """Refuse a delta that was made for other weights than those that it would change.

    Args:
        base_version: the version that it was made for; None: it does not say.
        serving: the version that serves.
        pending: the version that the open session has reached; None: the session has named none.
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
    """Checks the terms of a commit against pauses, memory and running requests, and acts on them."""

    _generation: Generation
    _memory: MemoryOccupation
    _requests: Requests

    def check(self, terms: CommitTerms) -> None:
        """Refuse a commit that should flush the cache while requests would keep KV of the old weights."""
        frees_kv = self.mode(terms) in (PauseMode.RETRACT, PauseMode.ABORT) or self._memory.is_kv_released
        if terms.flush_cache and self._requests.num_running > 0 and not frees_kv and not self._waits(terms):
            raise RequestRejected(
                f"{self._requests.num_running} requests hold KV of the present weights: pause with mode "
                "retract or abort, or pass flush_cache=false"
            )

    @property
    def nobody_waits(self) -> bool:
        """Whether no forward pass waits for a commit, however long it takes."""
        return self._generation.paused is not None or self._requests.num_running == 0

    def draining(self, terms: CommitTerms) -> AbstractContextManager[None]:
        """Within, admit no new request, if running requests are to end first."""
        return self._generation.drain() if terms.mode is PauseMode.WAIT else nullcontext()

    def ready(self, terms: CommitTerms) -> Iterator[Activity]:
        """Wait for running requests, if they are to end first; then check again.

        If the check fails, it is repeated after the pass in flight is committed: requests may end with it.
        """
        while self._waits(terms) and self._requests.num_begun > 0:
            yield Activity.DRAINING
        try:
            self.check(terms)
        except RequestRejected:
            yield Activity.BOUNDARY
            self.check(terms)

    def mode(self, terms: CommitTerms) -> PauseMode | None:
        """What happens to running requests; None: generation is paused, which decides instead."""
        return None if self._generation.paused is not None else terms.mode

    def stop_requests(self, terms: CommitTerms, mode: PauseMode | None) -> None:
        """Retract or abort requests before a commit, as the terms say.

        Args:
            mode: the result of `mode` when the commit was agreed to. A pause may have begun or ended while
                other replicas were waited for. Requests that still hold KV against the terms are retracted.
        """
        if mode is not None:
            self._generation.stop_requests(mode, RetractCause.UPDATE)
        if terms.flush_cache and self._requests.num_running > 0:
            self._generation.stop_requests(PauseMode.RETRACT, RetractCause.UPDATE)

    def answered(self, make: Callable[[Stages], Work[UpdateWeightsReqOutput]]) -> Operation:
        """Do an update. Its reply has the times of its stages; a failure says which weights serve now."""
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
        """Whether running requests are to end first. They cannot end if no forward pass can run."""
        return self.mode(terms) is PauseMode.WAIT and self._memory.allows_forward


def describe_nonfinite(nonfinite: Collection[str]) -> str:
    """A sentence that says which tensors hold NaN or Inf."""
    return f"{len(nonfinite)} tensors hold NaN or Inf: {first_few(sorted(nonfinite))}."
