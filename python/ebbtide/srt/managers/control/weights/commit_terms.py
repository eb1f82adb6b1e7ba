"""On what terms an update is committed, and what these ask of the engine's state.

One may be a canary: a forward pass of the new weights ahead of the commit, held against what the trainer
expects of them. Source: control_semantics section 2.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeAlias, TypeGuard

from ebbtide.srt.errors import EngineError, RequestRejected
from ebbtide.srt.managers.control.memory_occupation import MemoryOccupation
from ebbtide.srt.managers.control.operations import require_timeout
from ebbtide.srt.managers.control.pause import Generation, Paused
from ebbtide.srt.managers.control.ports import (
    Activity,
    DeadlinePassed,
    Operation,
    OutOfStep,
    Overruled,
    Ranks,
    Requests,
    Work,
)
from ebbtide.srt.managers.control.weight_content import Valid
from ebbtide.srt.managers.control.weight_ports import TrialPass, Weights
from ebbtide.srt.managers.io_struct import (
    BeginWeightUpdateReqInput,
    Canary,
    EndWeightUpdateReqInput,
    PauseMode,
    PiecewiseRequest,
    RetractCause,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromIPCReqInput,
    WeightUpdateRequest,
)
from ebbtide.srt.managers.wire.logprobs import LOWEST_LOGPROB
from ebbtide.srt.managers.wire.weight_requests import STATE_DICTS

logger = logging.getLogger(__name__)

# Calls what it is given while the new weights serve, and brings the old ones back.
Trial: TypeAlias = Callable[[Callable[[], list[float]]], Work[list[float]]]


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
    canary: Canary | None = None
    refuses_nonfinite: bool = False
    folder: tuple[str, str] | None = None


def check_fields(
    request: WeightUpdateRequest | BeginWeightUpdateReqInput | EndWeightUpdateReqInput,
) -> None:
    """Refuse values that no state allows."""
    if not isinstance(request, EndWeightUpdateReqInput) and request.selector == "draft":
        raise RequestRejected("selector 'draft': there is one model, expected 'target' or 'all'")
    require_timeout(request.timeout_s)


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
        """Wait for running requests, if they are to end first; then look again.

        That is at a boundary only where the pass under way may bring a refusal to its end: behind it fewer
        requests may run, and not more.
        """
        while self._waits(terms) and self._requests.num_running > 0:
            yield Activity.DRAINING
        try:
            self.check(terms)
        except RequestRejected:
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
            self._generation.stop_requests(mode, RetractCause.UPDATE)
        if terms.flush_cache and self._requests.num_running > 0:
            self._generation.stop_requests(PauseMode.RETRACT, RetractCause.UPDATE)

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
            advice = "give a longer timeout_s"
            if num_running := self._requests.num_running:
                advice = (
                    f"{num_running} requests were still running. Pause generation, or give pause_mode or a "
                    "longer timeout_s"
                )
            raise RequestRejected(f"the update was given up at its deadline: {advice}") from None
        except Exception as error:
            if not isinstance(self._memory.content.state, Valid):
                num_missing = len(self._memory.content.missing)
                failure = str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
                raise EngineError(
                    f"{failure}. No request runs: {num_missing} parameters are stale until an update "
                    "writes them"
                ) from error
            logger.error("a weight update failed; the old weights serve", exc_info=error)
            raise RequestRejected(
                f"the update failed, the old weights serve: {type(error).__name__}: {error}"
            ) from error

    def _waits(self, terms: CommitTerms) -> bool:
        """Whether running requests get to their end first. They cannot where no forward pass can run."""
        return self.mode(terms) is PauseMode.WAIT and self._memory.allows_forward


class CanaryTrials:
    """Tries staged weights out: exchanges them with the live ones for one forward pass.

    Args:
        weights: which say what an update refuses that does not say itself.
    """

    def __init__(
        self, trial_pass: TrialPass, memory: MemoryOccupation, ranks: Ranks, weights: Weights
    ) -> None:
        self._weights = weights
        self._pass = trial_pass
        self._memory = memory
        self._ranks = ranks

    def terms(self, request: WeightUpdateRequest | EndWeightUpdateReqInput, flush_cache: bool) -> CommitTerms:
        """On what terms a request would have its session committed.

        Raises:
            RequestRejected: 400, its canary can never be tried.
        """
        if request.canary is not None:
            self._check(request.canary)
        mode = request.pause_mode if request.pause_mode is not None else PauseMode.WAIT
        refuses_nonfinite, folder = False, None
        if isinstance(request, WeightUpdateRequest):
            if request.abort_all_requests:
                mode = PauseMode.ABORT
            asked = request.refuse_nonfinite
            refuses_nonfinite = self._weights.refuses_nonfinite if asked is None else asked
        if isinstance(request, UpdateWeightFromDiskReqInput):
            folder = request.model_path, request.load_format or "auto"
        version = None if request.weight_version is None else str(request.weight_version)
        return CommitTerms(mode, flush_cache, version, request.canary, refuses_nonfinite, folder)

    def _check(self, canary: Canary) -> None:
        ids, logprobs, limits = canary.input_ids, canary.logprobs, self._pass
        if not 2 <= len(ids) <= limits.max_tokens:
            raise RequestRejected(
                f"canary.input_ids: expected 2 to {limits.max_tokens} tokens, got {len(ids)}"
            )
        bad = next((token_id for token_id in ids if not 0 <= token_id < limits.vocab_size), None)
        if bad is not None:
            raise RequestRejected(
                f"canary.input_ids: {bad} is not in the vocabulary of {limits.vocab_size} ids"
            )
        if logprobs is not None and not _is_per_token(logprobs, len(ids)):
            raise RequestRejected(
                f"canary.logprobs: expected {len(ids) - 1} finite numbers, of the second token and those "
                f"behind it (or as many as tokens, the first null), got {len(logprobs)} entries"
            )
        if not (math.isfinite(canary.atol) and canary.atol >= 0):
            raise RequestRejected(f"canary.atol: expected a finite number from 0, got {canary.atol}")

    def run(self, canary: Canary, trial: Trial) -> Work[str]:
        """Run the pass by the new weights; says how it went.

        Raises:
            RequestRejected: 400, a rank found something else than was expected.
        """
        if self._memory.is_kv_released:
            raise RequestRejected("canary: its forward pass needs kv_cache: resume_memory_occupation first")
        passing = trial(lambda: self._pass.logprobs(canary.input_ids))
        logprobs, by_rank = yield from self._ranks.survey(Activity.ALONE, passing, lambda found: found)
        misses = [_miss(canary, found) for found in by_rank]
        if any(misses):
            told = "; ".join(f"rank {rank}: {miss}" for rank, miss in enumerate(misses) if miss)
            raise RequestRejected(
                f"the canary was missed, the old weights serve: {told}",
                canary={"logprobs": [None, *logprobs], "misses": [miss or None for miss in misses]},
            )
        if canary.logprobs is None:
            return f"The canary's {len(logprobs)} logprobs are finite."
        largest = max(abs(own - other) for own, other in zip(logprobs, _expected(canary), strict=True))
        return f"The canary's logprobs differ by at most {largest:.3g}."


def _is_per_token(logprobs: Sequence[float | None], num_tokens: int) -> bool:
    given = logprobs[1:] if len(logprobs) == num_tokens and logprobs[0] is None else logprobs
    return len(given) == num_tokens - 1 and all(one is not None and math.isfinite(one) for one in given)


def _expected(canary: Canary) -> list[float]:
    return [one for one in canary.logprobs or () if one is not None]


def _miss(canary: Canary, found: Sequence[float]) -> str:
    """What is wrong with a rank's logprobs; empty if nothing is."""
    bad = [index for index, logprob in enumerate(found, 1) if not LOWEST_LOGPROB < logprob < 1]
    if bad:
        return f"{len(bad)} of {len(found)} logprobs are not finite, the first that of token {bad[0]}"
    if canary.logprobs is None:
        return ""
    differences = [abs(own - other) for own, other in zip(found, _expected(canary), strict=True)]
    largest = max(differences)
    if largest <= canary.atol:
        return ""
    worst = differences.index(largest)
    num_out = sum(difference > canary.atol for difference in differences)
    return (
        f"{num_out} of {len(found)} logprobs differ by more than atol={canary.atol:g}; at token {worst + 1} "
        f"{found[worst]:.4f} instead of {_expected(canary)[worst]:.4f}"
    )
