"""Weight sources that bring only changes of the weights (deltas). Source: wire_vllm section 5."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, Protocol, TypeAlias

import torch
from torch import Tensor

from ebbtide.formats import ChangedTensor
from ebbtide.formats.delta import BITS, ESCAPES, MAX_ELEMENTS, decode_positions
from ebbtide.formats.stored_tensor import whole
from ebbtide.formats.tensor_refs import TensorHeader
from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.model_executor.weight_copies import NonFinite
from ebbtide.srt.model_executor.weight_store import TensorProblem, WeightStore
from ebbtide.srt.slices import Slices, finish
from ebbtide.srt.weight_sync.patch import MatrixPart, Patch, PatchedWeights
from ebbtide.srt.weight_sync.source import WeightSource
from ebbtide.srt.weight_sync.tensor_source import SAFETENSORS, PayloadReader, is_safetensors

CODES: Final = "codes"
VALUES: Final = "values"
_CHECKSUM: Final = re.compile("[0-9a-f]{16}")
# Bytes that a device reads and writes for one changed element.
LINE_BYTES: Final = 64


class PlacedChanges(Protocol):
    """Changes of several tensors, with their places in this rank's weights."""

    def verify(self) -> Iterator[int]:
        """Check the patched tensors by their digests, if there are any, or refuse; yields bytes."""

    def sums_after(self, known: Sequence[int | None]) -> Slices[Tensor]:
        """This rank's share of each tensor's `state_sum` after the changes, int64.

        Args:
            known: its share before the changes; None: it must be computed.
        """

    def apply(self) -> Slices[None]:
        """Write this rank's part of the changes."""

    def nonfinite(self) -> list[int]:
        """After `apply` has run: indices of the tensors with a new value that is NaN or Inf."""


Placing: TypeAlias = Callable[[PatchedWeights], PlacedChanges]


class DeltaSource(WeightSource):
    """A set of changes from a sender. It is opened, then placed.

    Args:
        payload: the source of the encoded changes.
        decode: decodes the payload after it was opened or has arrived; returns a function that places the
            changes.
        checksums: the `state_sum` that each tensor must have afterwards, by name.
        moved_bytes: how many bytes a device moves to write the changes, once they are in its memory.
        takes_any_dtype: whether values are converted to the parameter's dtype; else they are its bits.
    """

    def __init__(
        self,
        entries: Sequence[TensorHeader],
        payload: WeightSource,
        decode: Callable[[], Slices[Placing]],
        *,
        checksums: Mapping[str, int] | None = None,
        base_version: str | None = None,
        moved_bytes: int = sys.maxsize,
        takes_any_dtype: bool = False,
    ) -> None:
        super().__init__(entries, tuple)
        self.is_sent = payload.is_sent
        self.base_version = base_version
        self.checksums = {} if checksums is None else checksums
        names, shapes = [each.name for each in entries], [each.shape for each in entries]
        self.digest = (takes_any_dtype, *names, *shapes, *[each.dtype for each in entries])
        self._payload = payload
        self._decode = decode
        self._moved_bytes = moved_bytes
        self._takes_any_dtype = takes_any_dtype
        self._placing: Placing | None = None

    @property
    def near_bytes(self) -> int:
        return self._moved_bytes

    def misfit(
        self, store: WeightStore, entry: TensorHeader, dtypes: Mapping[str, torch.dtype]
    ) -> TensorProblem | None:
        return store.check_change(entry.name, entry.dtype, of_bits=not self._takes_any_dtype)

    def open(self) -> Slices[None]:
        yield from self._payload.open()
        self._placing = yield from self._decode()

    def place(self, weights: PatchedWeights) -> PlacedChanges:
        """Find the places of the changes, or refuse (400) positions that are outside or given twice."""
        if self._placing is None:  # Broadcasts are not opened, so they are not decoded yet.
            self._placing = finish(self._decode())
        return self._placing(weights)

    def arrived(self) -> bool:
        return self._payload.arrived()

    def abandon(self) -> bool:
        return self._payload.abandon()

    def detach(self) -> Slices[None]:
        self._placing = None
        return self._payload.detach()

    def close(self) -> None:
        self._placing = None
        self._payload.close()


class PlacedPatches:
    """Patches, one per tensor; if a tensor has several, they are written in order."""

    def __init__(self, patches: Sequence[Patch], weights: PatchedWeights) -> None:
        self._pairs = [
            (patch, MatrixPart.for_patch(patch, weights.destination(patch.name))) for patch in patches
        ]
        self._nonfinite = NonFinite()

    def verify(self) -> Slices[None]:
        for patch, place in self._pairs:
            if place is not None and patch.digest is not None:
                place.check(patch)
                yield place.region.nbytes

    def sums_after(self, known: Sequence[int | None]) -> Slices[Tensor]:
        sums = []
        for (patch, place), before in zip(self._pairs, known, strict=True):
            share = patch.positions.new_zeros(()) if place is None else place.sum_after(patch, before)
            sums.append(share)
            yield patch.values.nbytes
        return torch.stack(sums) if sums else torch.zeros(0, dtype=torch.int64)

    def apply(self) -> Slices[None]:
        for index, (patch, place) in enumerate(self._pairs):
            if place is not None:
                self._nonfinite.add(str(index), place.apply(patch))
            yield patch.values.nbytes
        self._nonfinite.finish()

    def nonfinite(self) -> list[int]:
        return [int(index) for index in self._nonfinite.names()]


def coded_source(
    changed: Sequence[ChangedTensor],
    payload: WeightSource,
    device: torch.device,
    base_version: str | None = None,
) -> DeltaSource:
    """Changes as the trainer's `WeightSender` encodes them, see `formats.delta`.

    Args:
        payload: two tensors: the codes and the values of all changed tensors.
    """
    try:
        codes, values = _codes_and_values(payload)
        _check_header(changed, codes, values)
    except RequestRejected:
        payload.close()
        raise
    entries = [TensorHeader(each.name, each.shape, values.dtype) for each in changed]

    def decode() -> Slices[Placing]:
        tensors = {name: whole(tensor).to(device) for name, tensor in payload}
        yield tensors[VALUES].nbytes
        place = _place_blocks if device.type == "cuda" else _place_patches
        return place(changed, tensors[CODES], tensors[VALUES])

    touched = (
        -math.expm1(-each.num_changed * LINE_BYTES / max(1, entry.num_bytes)) * entry.num_bytes
        for each, entry in zip(changed, entries, strict=True)
    )
    return DeltaSource(
        entries,
        payload,
        decode,
        checksums={each.name: int(each.checksum, 16) for each in changed if each.checksum is not None},
        base_version=base_version,
        moved_bytes=int(sum(touched)),
    )


def _place_patches(changed: Sequence[ChangedTensor], codes: Tensor, values: Tensor) -> Placing:
    patches = [
        Patch(each.name, each.shape, decode_positions(code), value)
        for each, code, value in zip(
            changed,
            torch.split(codes, [each.num_codes for each in changed]),
            torch.split(values, [each.num_changed for each in changed]),
            strict=True,
        )
    ]
    for patch in patches:
        last = int(patch.positions[-1]) if len(patch.positions) else -1
        _check_positions(patch.name, patch.shape, last, len(patch.positions), len(patch.values))
    return lambda weights: PlacedPatches(patches, weights)


def _place_blocks(changed: Sequence[ChangedTensor], codes: Tensor, values: Tensor) -> Placing:
    # Triton is only installed with CUDA.
    from ebbtide.srt.weight_sync.patch_kernels import PlacedBlocks, coded_blocks

    blocks = coded_blocks(codes, [each.num_codes for each in changed])
    for each, last, num_values in zip(changed, blocks.lasts, blocks.num_values, strict=True):
        _check_positions(each.name, each.shape, last, num_values, each.num_changed)
    names, base_dtype = [each.name for each in changed], BITS[values.dtype.itemsize]
    return lambda weights: PlacedBlocks(blocks, values, weights.table(names), weights.base(base_dtype))


def open_sparse(
    entries: Sequence[bytes | str],
    changed: Sequence[ChangedTensor] | None,
    device: torch.device,
    reader: PayloadReader,
    base_version: str | None = None,
) -> Slices[DeltaSource]:
    """Open `serialized_named_tensors` of the format `sparse`; every rank gets all changes."""
    if changed is None:
        raise RequestRejected("changed: load_format sparse needs it, one entry per tensor")
    # If each rank has an entry of its own, the entries of other ranks are empty here.
    is_image = any(entry and is_safetensors(entry) for entry in entries)
    payload = yield from reader.open(entries, SAFETENSORS if is_image else None)
    return coded_source(changed, payload, device, base_version)


def _codes_and_values(payload: WeightSource) -> tuple[TensorHeader, TensorHeader]:
    headers = {entry.name: entry for entry in payload.entries}
    if headers.keys() != {CODES, VALUES} or len(payload.entries) != 2:
        found = ", ".join(sorted(headers))[:200] or "none"
        raise RequestRejected(f"load_format sparse: expected the tensors {CODES} and {VALUES}, got {found}")
    return headers[CODES], headers[VALUES]


def _check_header(changed: Sequence[ChangedTensor], codes: TensorHeader, values: TensorHeader) -> None:
    if codes.dtype not in ESCAPES:
        known = " or ".join(map(str, ESCAPES))
        raise RequestRejected(f"{CODES}: expected {known}, got {codes.dtype}")
    for header, expected in (
        (codes, sum(each.num_codes for each in changed)),
        (values, sum(each.num_changed for each in changed)),
    ):
        if header.shape != (expected,):
            raise RequestRejected(
                f"{header.name}: expected [{expected}] as `changed` says, got {list(header.shape)}"
            )
    names = [each.name for each in changed]
    if len(set(names)) != len(names):
        raise RequestRejected("changed: a tensor is named twice")
    for each in changed:
        if math.prod(each.shape) > MAX_ELEMENTS:
            raise RequestRejected(
                f"{each.name[:200]}: a delta is of at most {MAX_ELEMENTS} elements: send this tensor whole"
            )
        if each.checksum is not None and _CHECKSUM.fullmatch(each.checksum) is None:
            raise RequestRejected(
                f"{each.name[:200]}: checksum: expected 16 hexadecimal digits, got {each.checksum[:40]!r}"
            )


def _check_positions(
    name: str, shape: tuple[int, ...], last: int, num_positions: int, num_values: int
) -> None:
    if num_positions != num_values:
        raise RequestRejected(
            f"{name[:200]}: its codes are {num_positions} positions, its values {num_values}"
        )
    num_elements = torch.Size(shape).numel()
    if last >= num_elements:
        raise RequestRejected(f"{name[:200]}: position {last} of a tensor of {num_elements} elements")
