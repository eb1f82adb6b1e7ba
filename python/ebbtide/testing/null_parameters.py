"""Checks of null weights: their checksums, copies of them, and what differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.control.ports import Slices
from ebbtide.srt.managers.io_struct import ChecksumAlgorithm, RankChecksums, WeightPiece

if TYPE_CHECKING:
    from ebbtide.testing.null_weights import NullWeights


class NullParameters:
    """The parameters of null weights; a checksum is the integer itself."""

    def __init__(self, weights: NullWeights) -> None:
        self.generation = 0
        self._weights = weights

    def live(self, skipped: Sequence[str]) -> dict[str, int | None]:
        return {
            name: value
            for name, value in self._weights.live.items()
            if not any(part in name for part in skipped)
        }

    def read(self, skipped: Sequence[str]) -> Slices[dict[str, int | None]]:
        """Each integer in a slice of its own; None where it is not whole."""
        values: dict[str, int | None] = {}
        for name in self.live(skipped):
            yield from self._weights.slice()
            values[name] = self._weights.live[name]
        return values

    def checksums(self, skipped: Sequence[str], algorithm: ChecksumAlgorithm) -> Slices[RankChecksums]:
        self._weights.fail_at("check")
        values = yield from self.read(skipped)
        checksums = {name: str(value) for name, value in values.items()}
        return RankChecksums(checksums=checksums, per_gpu_checksum=str(values), parallelism_info=[])

    def snapshot(self) -> Slices[NullSnapshot]:
        self._weights.fail_at("check")
        values = yield from self.read(())
        assert None not in values.values(), "weights were copied that are not whole"
        return NullSnapshot(self, values)

    def sources(self, skipped: Sequence[str]) -> frozenset[str]:
        return frozenset(self.live(skipped))

    def pieces(self, index: int, first_byte: int, num_bytes: int) -> list[WeightPiece]:
        self._weights.fail_at("check")
        live = self.live(())
        if index >= len(live):
            raise RequestRejected(f"index: expected 0 to {len(live) - 1}, got {index}")
        name, value = list(live.items())[index]
        assert value is not None, "a weight was read that is not whole"
        data = value.to_bytes(8, "little", signed=True)[first_byte : first_byte + num_bytes]
        piece = WeightPiece(
            num_parameters=len(live),
            generation=self.generation,
            name=name,
            dtype="int64",
            shape=(),
            data=data,
        )
        return [piece]

    def fill(self, skipped: Sequence[str]) -> None:
        self.generation += 1
        self._weights.write(dict.fromkeys(self.live(skipped), None))


@dataclass(frozen=True)
class NullSnapshot:
    """What null weights once were."""

    parameters: NullParameters
    values: Mapping[str, int | None]

    def differences(self, skipped: Sequence[str]) -> Slices[list[dict[str, str]]]:
        now = yield from self.parameters.read(skipped)
        return [
            {"name": name, "reason": f"{value} was {self.values[name]}"}
            for name, value in now.items()
            if value != self.values[name]
        ]
