"""Reads what the weights are: single ones, checksums of all, and a copy to compare them with.

A trainer that doubts its own updates copies the weights, fills them with anything, sends them again and
compares. Source: wire_api section 3.3, `/weights_checker`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Final, TypeVar

import msgspec

from ebbtide.srt.errors import RequestRejected, first_few
from ebbtide.srt.managers.control.memory_occupation import MemoryOccupation
from ebbtide.srt.managers.control.pace import Pace
from ebbtide.srt.managers.control.ports import Activity, HandlerTable, Operation, Ranks, Slices, Work
from ebbtide.srt.managers.control.weight_ports import Snapshot, Weights
from ebbtide.srt.managers.io_struct import (
    AnyReply,
    ChecksumAlgorithm,
    CheckWeightsReqInput,
    CheckWeightsReqOutput,
    GetWeightsByNameReqInput,
    GetWeightsByNameReqOutput,
    RankChecksums,
    ReadWeightsReqInput,
    ReadWeightsReqOutput,
)
from ebbtide.srt.memory_saver.tags import MemoryTag

T = TypeVar("T")

MAX_ERRORS: Final = 20


class WeightChecks:
    """Answers with single weights, pieces of what may serve, and checks: a copy is on all ranks or on none.

    So it is with replicas: where one cannot copy, or is not as its copy, all keep the copy that they had.

    Args:
        is_updating: whether an update is under way, or a session open.
    """

    def __init__(
        self,
        weights: Weights,
        memory: MemoryOccupation,
        ranks: Ranks,
        pace: Pace,
        is_updating: Callable[[], bool],
    ) -> None:
        self._weights = weights
        self._parameters = weights.parameters
        self._memory = memory
        self._ranks = ranks
        self._pace = pace
        self._is_updating = is_updating
        self._snapshot: Snapshot | None = None
        self.handlers: HandlerTable = {
            GetWeightsByNameReqInput: self.read_one,
            CheckWeightsReqInput: self.check,
            ReadWeightsReqInput: self.read,
        }

    def read_one(self, request: GetWeightsByNameReqInput) -> AnyReply:
        """The first rows of a weight that serves."""
        if request.truncate_size < 0:
            raise RequestRejected(f"truncate_size: expected 0 or more rows, got {request.truncate_size}")
        name = self._weights.stored_as(request.name)
        if name in self._weights.names:
            if MemoryTag.WEIGHTS in self._memory.released:
                raise RequestRejected("the weights are released: resume them first", 409)
            if name in self._memory.content.missing:
                raise RequestRejected(
                    f"{name} is stale: it was not written since the weights were resumed", 409
                )
        values = self._weights.read(name, request.truncate_size)
        return GetWeightsByNameReqOutput(values=values, message=self._weights.precision_of(name))

    def read(self, request: ReadWeightsReqInput) -> AnyReply:
        """Pieces of parameters, of every rank."""
        self._require_resident()
        self._require_whole()
        pieces = self._parameters.pieces(request.index, request.first_byte, request.num_bytes)
        return ReadWeightsReqOutput(pieces=[pieces])

    def check(self, request: CheckWeightsReqInput) -> AnyReply | Operation:
        """Do what `action` says."""
        self._require_resident()
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
        work = self._watched(_refusing(snapshot.differences(skipped)))
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
        # Stale first: whatever becomes of the rest, nothing runs on it.
        if names:
            self._memory.content.lose(names)
        self._ranks.certainly(lambda: self._parameters.fill(skipped))
        return CheckWeightsReqOutput(
            message=f"{len(names)} tensors hold random values now: nothing runs until they are updated."
        )

    def _require_resident(self) -> None:
        if MemoryTag.WEIGHTS in self._memory.released:
            raise RequestRejected(
                "the weights are released: resume_memory_occupation(['weights']) first", 409
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
        _, result = yield from self._pace.turns(self._while_unchanged(slices), Activity.WORKING)
        return result

    def _while_unchanged(self, slices: Slices[T]) -> Slices[T]:
        """The same work, refused if a control request changes or releases the weights between two turns."""
        before = self._parameters.generation, self._memory.content.missing
        with closing(slices):
            while True:
                now = self._parameters.generation, self._memory.content.missing
                if now != before or MemoryTag.WEIGHTS in self._memory.released:
                    raise RequestRejected("the weights were changed or released meanwhile: ask again", 409)
                try:
                    yield next(slices)
                except StopIteration as end:
                    result: T = end.value
                    return result


def _refusing(differences: Slices[list[dict[str, str]]]) -> Slices[None]:
    """Refused if there are any."""
    errors = yield from differences
    if errors:
        listed = first_few([f"{error['name']} ({error['reason']})" for error in errors])
        raise RequestRejected(
            f"{len(errors)} parameters are not those of the snapshot: {listed}",
            400,
            errors=errors[:MAX_ERRORS],
            num_errors=len(errors),
        )
