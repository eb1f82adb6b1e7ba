"""Reads and checks weights: single tensors, checksums, comparison with a copy, and a trial pass (canary).

To test its updates, a trainer takes a copy of the weights, overwrites them with random values, sends them
again and compares. Sources: wire_api section 3.3, `/weights_checker`; control_semantics section 2 (canary).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

import msgspec

from ebbtide.srt.errors import RequestRejected, first_few
from ebbtide.srt.managers.control import (
    Activity,
    DeadlinePassed,
    HandlerTable,
    Operation,
    Superseded,
    Work,
)
from ebbtide.srt.managers.control.memory_occupation import MemoryOccupation
from ebbtide.srt.managers.control.pace import Pace, Ranks, at_once, guarded
from ebbtide.srt.managers.control.weights import Snapshot, TrialPass, Weights
from ebbtide.srt.managers.io_struct import (
    AnyReply,
    Canary,
    ChecksumAlgorithm,
    CheckWeightsReqInput,
    CheckWeightsReqOutput,
    GetWeightsByNameReqInput,
    GetWeightsByNameReqOutput,
    RankChecksums,
    ReadWeightsReqInput,
    ReadWeightsReqOutput,
)
from ebbtide.srt.managers.wire.generation import LOWEST_LOGPROB
from ebbtide.srt.managers.wire.merging import MAX_ERRORS
from ebbtide.srt.memory_saver import MemoryTag
from ebbtide.srt.slices import Slices

T = TypeVar("T")

# Calls its argument while the new weights are live, then brings the old ones back; returns the result.
Trial: TypeAlias = Callable[[Callable[[], list[float]]], Work[list[float]]]


@dataclass
class WeightChecks:
    """Handles the control requests that read, compare and overwrite weights.

    All ranks have a copy (snapshot), or none has. The same holds for replicas: if one cannot copy, or differs
    from its copy, all keep the copy that they had.
    """

    _weights: Weights
    _memory: MemoryOccupation
    _ranks: Ranks
    _pace: Pace
    _is_updating: Callable[[], bool]
    _snapshot: Snapshot | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._parameters = self._weights.parameters
        self.handlers: HandlerTable = {
            GetWeightsByNameReqInput: self.read_one,
            CheckWeightsReqInput: self.check,
            ReadWeightsReqInput: self.read,
        }

    def read_one(self, request: GetWeightsByNameReqInput) -> Operation:
        name = self._weights.stored_as(request.name)
        if name in self._weights.names:
            self._memory.require_weights()
            if name in self._memory.content.missing:
                raise RequestRejected(
                    f"{name} is stale: it was not written since the weights were resumed", 409
                )
        reading = at_once(lambda: self._weights.read(name, request.truncate_size))
        joined = yield from self._ranks.phase(Activity.ALONE, reading)
        return GetWeightsByNameReqOutput(values=joined(), message=self._weights.precision_of(name))

    def read(self, request: ReadWeightsReqInput) -> AnyReply:
        self._memory.require_weights()
        self._require_whole()
        pieces = self._parameters.pieces(request.index, request.first_byte, request.num_bytes)
        return ReadWeightsReqOutput(pieces=[pieces])

    def check(self, request: CheckWeightsReqInput) -> AnyReply | Operation:
        self._memory.require_weights()
        skipped = request.skip_tensor_list or ()
        match request.action:
            case "checksum":
                return self._checksums(skipped, request.algorithm)
            case "snapshot":
                return self._take_snapshot()
            case "compare":
                return self._compare(skipped)
            case "reset_tensors":
                return self._reset(skipped)

    def _checksums(self, skipped: Sequence[str], algorithm: ChecksumAlgorithm) -> Operation:
        work = self._watched(self._parameters.checksums(skipped, algorithm))
        _, facts = yield from self._ranks.survey(Activity.WORKING, work, msgspec.to_builtins)
        by_rank = msgspec.convert(facts, list[RankChecksums])
        total = hashlib.sha256("".join(rank.per_gpu_checksum for rank in by_rank).encode()).hexdigest()
        message = f"Checksums of {len(by_rank[0].checksums)} parameters."
        if num_stale := len(self._memory.content.missing):
            message += f" {num_stale} tensors are stale: they were not written since a resume or a reset."
        return CheckWeightsReqOutput(message=message, per_engine_checksum=total, by_rank=by_rank)

    def _take_snapshot(self) -> Operation:
        self._require_whole()
        work = self._watched(self._parameters.snapshot())
        snapshot = yield from self._ranks.phase(Activity.WORKING, work)
        yield Activity.PREPARED
        self._snapshot = snapshot
        return CheckWeightsReqOutput(message="The parameters were copied to host memory.")

    def _compare(self, skipped: Sequence[str]) -> Operation:
        snapshot = self._snapshot
        if snapshot is None:
            raise RequestRejected("there is no snapshot: take one with action 'snapshot' first", 409)
        work = self._watched(_refusing(snapshot(skipped)))
        yield from self._ranks.phase(Activity.WORKING, work)
        yield Activity.PREPARED
        self._snapshot = None
        return CheckWeightsReqOutput(message="The parameters are those of the snapshot, which is freed.")

    def _reset(self, skipped: Sequence[str]) -> AnyReply:
        if self._is_updating():
            raise RequestRejected(
                "a weight update is under way or a session is open, which this would spoil: end it first",
                409,
            )
        names = self._parameters.sources(skipped)
        # Mark them stale first: if the rest fails, nothing runs on half-written weights.
        if names:
            self._memory.content.lose(names)
        self._ranks.certainly(lambda: self._parameters.fill(skipped))
        return CheckWeightsReqOutput(
            message=f"{len(names)} tensors hold random values now: nothing runs until they are updated."
        )

    def _require_whole(self) -> None:
        missing = self._memory.content.missing
        if missing:
            raise RequestRejected(
                f"the weights are stale: {len(missing)} tensors were not written since a resume or a reset "
                f"({first_few(sorted(missing))}): update them first",
                409,
            )

    def _watched(self, slices: Slices[T]) -> Work[T]:
        """Do this work; refused as soon as the weights are changed or released between two turns."""
        before = self._parameters.generation, self._memory.content.missing

        def require_unchanged() -> None:
            now = self._parameters.generation, self._memory.content.missing
            if now != before or MemoryTag.WEIGHTS in self._memory.released:
                raise RequestRejected("the weights were changed or released meanwhile: ask again", 409)

        def watched() -> Work[T]:
            _, result = yield from self._pace.turns(guarded(slices, require_unchanged), Activity.WORKING)
            return result

        return watched()


def _refusing(differences: Slices[list[dict[str, str]]]) -> Slices[None]:
    """Refuse if there are differences."""
    errors = yield from differences
    if errors:
        listed = first_few([f"{error['name']} ({error['reason']})" for error in errors])
        raise RequestRejected(
            f"{len(errors)} parameters are not those of the snapshot: {listed}",
            400,
            errors=errors[:MAX_ERRORS],
            num_errors=len(errors),
        )


@dataclass
class CanaryTrials:
    """Runs one forward pass with staged weights, exchanged with the live ones for that time."""

    _pass: TrialPass
    _memory: MemoryOccupation
    _ranks: Ranks

    def check(self, canary: Canary) -> None:
        """Refuse (400) a canary that can never be run."""
        ids, logprobs, limits = canary.input_ids, canary.logprobs, self._pass
        if len(ids) > limits.max_tokens:
            raise RequestRejected(
                f"canary.input_ids: expected 2 to {limits.max_tokens} tokens, got {len(ids)}"
            )
        if max(ids) >= limits.vocab_size:
            raise RequestRejected(
                f"canary.input_ids: {max(ids)} is not in the vocabulary of {limits.vocab_size} ids"
            )
        if logprobs is not None and not _is_per_token(logprobs, len(ids)):
            raise RequestRejected(
                f"canary.logprobs: expected {len(ids) - 1} finite numbers, of the second token and those "
                f"behind it (or as many as tokens, the first null), got {len(logprobs)} entries"
            )

    def run(self, canary: Canary, trial: Trial, adapter_slot: int | None = None) -> Work[str]:
        """Run the pass with the new weights or adapter. Returns a sentence for the reply.

        RequestRejected: a rank's logprobs are not finite, or not as expected.
        """
        if self._memory.is_kv_released:
            raise RequestRejected("canary: its forward pass needs kv_cache: resume_memory_occupation first")
        yield Activity.BOUNDARY
        # Outside of the phase: its part runs before a message on one rank, and after it on another.
        with self._pass.room(len(canary.input_ids)):
            passing = trial(lambda: self._pass.logprobs(canary.input_ids, adapter_slot))
            trying = self._ranks.survey(Activity.ALONE, passing, lambda found: found)
            logprobs, by_rank = yield from _to_its_end(trying)
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


def _to_its_end(work: Work[T]) -> Work[T]:
    """Do the work to its end even if it is ended from outside, which is raised afterwards.

    The other ranks are in the middle of the same work, and would wait for this one.
    """
    ended: Exception | None = None
    while True:
        try:
            activity = next(work)
        except StopIteration as end:
            if ended is not None:
                raise ended from None
            result: T = end.value
            return result
        try:
            yield activity
        except (DeadlinePassed, Superseded) as error:
            ended = error


def _is_per_token(logprobs: Sequence[float | None], num_tokens: int) -> bool:
    given = logprobs[1:] if len(logprobs) == num_tokens and logprobs[0] is None else logprobs
    return len(given) == num_tokens - 1 and all(one is not None and math.isfinite(one) for one in given)


def _expected(canary: Canary) -> list[float]:
    return [one for one in canary.logprobs or () if one is not None]


def _miss(canary: Canary, found: Sequence[float]) -> str:
    """Why a rank's logprobs miss the canary; empty if they do not."""
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
