"""A forward pass of new weights ahead of their commit, held against what the trainer expects of them.

Source: control_semantics section 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.control.memory_occupation import MemoryOccupation
from ebbtide.srt.managers.control.ports import Activity, Ranks, Work
from ebbtide.srt.managers.control.weight_ports import TrialPass
from ebbtide.srt.managers.io_struct import Canary
from ebbtide.srt.managers.wire.token_columns import LOWEST_LOGPROB

# Calls what it is given while the new weights serve, and brings the old ones back.
Trial: TypeAlias = Callable[[Callable[[], list[float]]], Work[list[float]]]


class CanaryTrials:
    """Tries staged weights out: exchanges them with the live ones for one forward pass."""

    def __init__(self, trial_pass: TrialPass, memory: MemoryOccupation, ranks: Ranks) -> None:
        self._pass = trial_pass
        self._memory = memory
        self._ranks = ranks

    def check(self, canary: Canary) -> None:
        """Refuse (400) one that can never be tried."""
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
            listed = "; ".join(f"rank {rank}: {miss}" for rank, miss in enumerate(misses) if miss)
            raise RequestRejected(
                f"the canary was missed, the old weights serve: {listed}",
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
