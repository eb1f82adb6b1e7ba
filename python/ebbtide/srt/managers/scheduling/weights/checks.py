"""Looks at the weights of a rank: checksums and copies of its parameters."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import psutil
import torch
from torch import Tensor

from ebbtide.srt.config import Place
from ebbtide.srt.device.base import Device
from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.control.weight_ports import Snapshot
from ebbtide.srt.managers.io_struct import ChecksumAlgorithm, RankChecksums, WeightPiece
from ebbtide.srt.managers.wire.message import Parallelism
from ebbtide.srt.model_executor.weight_store import WeightStore

# What is read at once: intermediate results take twice as much beside it.
PIECE_BYTES: Final = 16 << 20

WORD_BYTES: Final = 8
# SplitMix64's numbers without their highest bits: odd, with bits all over. They stay: a client may have kept
# sums to compare with later.
PLACE_FACTOR: Final = 0x1E3779B97F4A7C15
MIXING_FACTORS: Final = (0x3F58476D1CE4E5B9, 0x14D049BB133111EB)
LOW_32_BITS: Final = (1 << 32) - 1


@dataclass
class ParameterChecker:
    """Implements `weight_ports.Parameters`, piece by piece on their device."""

    _store: WeightStore
    _device: Device
    _place: Place

    @property
    def generation(self) -> int:
        return self._store.generation

    def checksums(
        self, skipped: Sequence[str], algorithm: ChecksumAlgorithm = "sum64"
    ) -> Generator[int, None, RankChecksums]:
        """Of the bytes of each parameter and their places; the same on every kind of device."""
        checksums: dict[str, str] = {}
        summed = _sha256 if algorithm == "sha256" else _sum64
        for name, parameter in _without(skipped, self._store):
            checksums[name] = yield from summed(parameter)
        place = self._place
        listed = "".join(f"{name}={checksums[name]};" for name in sorted(checksums))
        return RankChecksums(
            checksums=checksums,
            per_gpu_checksum=hashlib.sha256(listed.encode()).hexdigest(),
            parallelism_info=[
                Parallelism(
                    tp_rank=place.tp_rank,
                    tp_size=place.tp_size,
                    dp_rank=place.dp_rank,
                    dp_size=place.dp_size,
                    rank=place.rank,
                    size=place.num_ranks,
                )
            ],
        )

    def snapshot(self) -> Generator[int, None, Snapshot]:
        needed_bytes = sum(parameter.nbytes for _, parameter in self._store.parameters())
        free_bytes = psutil.virtual_memory().available
        if needed_bytes > free_bytes:
            raise _no_room(needed_bytes, free_bytes)
        taken_bytes = 0
        copies: dict[str, list[Tensor]] = {}
        for name, parameter in self._store.parameters():
            copies[name] = []
            for piece in _pieces(parameter):
                try:
                    copy = torch.empty_like(piece, device="cpu")
                except RuntimeError as error:
                    # Others take memory too, and this process may have a limit of its own.
                    raise _no_room(needed_bytes, taken_bytes) from error
                taken_bytes += len(piece)
                copies[name].append(copy.copy_(piece))
                yield len(piece)
        return partial(self._differences, copies)

    def _differences(
        self, copies: Mapping[str, list[Tensor]], skipped: Sequence[str]
    ) -> Generator[int, None, list[dict[str, str]]]:
        """A reason gives the largest difference of two elements, `max_abs_err`; NaN where one of them is."""
        found: list[dict[str, str]] = []
        for name, parameter in _without(skipped, self._store):
            num_different, max_abs_err = 0, 0.0
            for piece, copy in zip(_pieces(parameter), copies[name], strict=True):
                before = copy.to(piece.device)
                num_here = int((piece != before).sum())
                if num_here:
                    error = (piece.view(parameter.dtype).float() - before.view(parameter.dtype).float()).abs()
                    max_abs_err = float(torch.maximum(error.max().cpu(), torch.tensor(max_abs_err)))
                num_different += num_here
                yield len(piece)
            if num_different:
                reason = (
                    f"{num_different} of {parameter.nbytes} bytes are not those of the snapshot: "
                    f"max_abs_err={max_abs_err:g}"
                )
                found.append({"name": name, "reason": reason})
        return found

    def sources(self, skipped: Sequence[str]) -> frozenset[str]:
        covered = [self._store.covered(name, direct=True) for name, _ in _without(skipped, self._store)]
        return frozenset[str]().union(*covered)

    def pieces(self, index: int, first_byte: int, num_bytes: int) -> list[WeightPiece]:
        parameters = list(self._store.parameters())
        if index >= len(parameters):
            raise RequestRejected(f"index: expected 0 to {len(parameters) - 1}, got {index}")
        pieces: list[WeightPiece] = []
        left_bytes = num_bytes
        for name, parameter in parameters[index:]:
            if pieces and (first_byte > 0 or parameter.nbytes > left_bytes):
                break
            flat = parameter.view(-1).view(torch.uint8)[first_byte : first_byte + num_bytes]
            left_bytes -= len(flat)
            pieces.append(
                WeightPiece(
                    num_parameters=len(parameters),
                    generation=self.generation,
                    name=name,
                    dtype=str(parameter.dtype).removeprefix("torch."),
                    shape=tuple(parameter.shape),
                    data=flat.cpu().numpy().tobytes(),
                )
            )
        return pieces

    def fill(self, skipped: Sequence[str]) -> None:
        self._store.note_write()
        for _, parameter in _without(skipped, self._store):
            for piece in _pieces(parameter):
                piece.random_(0, 256)
        self._device.synchronize()


def _no_room(needed_bytes: int, free_bytes: int) -> RequestRejected:
    message = f"a snapshot takes {needed_bytes} bytes of host memory, {free_bytes} are free"
    return RequestRejected(message, 409, needed_bytes=needed_bytes, free_bytes=free_bytes)


def _without(skipped: Sequence[str], store: WeightStore) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in store.parameters():
        if not any(part in name for part in skipped):
            yield name, parameter


def _pieces(parameter: Tensor) -> Iterator[Tensor]:
    """Views of its bytes, in order."""
    return iter(torch.split(parameter.detach().reshape(-1).view(torch.uint8), PIECE_BYTES))


def _sum64(parameter: Tensor) -> Generator[int, None, str]:
    total = first_word = 0
    for piece in _pieces(parameter):
        words = _words(piece)
        total += _sum_of_mixed(words, first_word)
        first_word += len(words)
        yield len(piece)
    return f"{total % 2**64:016x}"


def _sha256(parameter: Tensor) -> Generator[int, None, str]:
    digest = hashlib.sha256()
    for piece in _pieces(parameter):
        digest.update(piece.cpu().numpy().data)
        yield len(piece)
    return digest.hexdigest()


def _words(piece: Tensor) -> Tensor:
    """The bytes in words; the last one filled up with zeros."""
    num_odd = len(piece) % WORD_BYTES
    if num_odd:
        piece = torch.nn.functional.pad(piece, (0, WORD_BYTES - num_odd))
    return piece.view(torch.int64)


def _sum_of_mixed(words: Tensor, first: int) -> int:
    """The sum of numbers that each depend on every bit of a word and of its place, modulo 2^64.

    Integers wrap around alike on every device, in whatever order they are added. Source: the multiply and
    shift steps of SplitMix64 (Steele, Lea, Flood, 2014).
    """
    mixed = torch.arange(first, first + len(words), device=words.device)
    mixed *= PLACE_FACTOR
    mixed ^= words
    for factor in MIXING_FACTORS:
        mixed *= factor
        # The shift of signed words brings ones along.
        high = mixed >> 32
        high &= LOW_32_BITS
        mixed ^= high
    return int(mixed.sum())
