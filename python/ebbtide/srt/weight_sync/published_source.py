"""A weight source over versions that a trainer published, for `update_weights_from_disk` of a pulled folder.

Source: wire_vllm section 5.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from ebbtide.formats.delta import BITS
from ebbtide.formats.tensor_refs import TensorHeader
from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.weight_sync.delta.folder import (
    PublishedDelta,
    PulledState,
    checksum_of,
    decompress,
    names_of,
    open_files,
    read_chain,
)
from ebbtide.srt.weight_sync.delta.patch import Patch, PatchedWeights, PatchKind
from ebbtide.srt.weight_sync.sparse_source import DeltaSource, PlacedChanges, PlacedPatches

# A name → shape and dtype of the parameter; None for one that the model does not have.
Describe: TypeAlias = Callable[[str], tuple[tuple[int, ...], torch.dtype] | None]

_COUNT_BYTES = 4


@dataclass
class _Changes:
    """What becomes of a tensor's bytes: those of `values` where `mask` says so, or by exclusive or."""

    values: Tensor
    mask: Tensor | None

    def follow(self, later: _Changes) -> None:
        """Both, one after the other."""
        if self.mask is None or later.mask is None:
            self.values ^= later.values
        else:
            self.mask |= later.mask
            self.values = torch.where(later.mask, later.values, self.values)

    def apply(self, old: Tensor) -> Tensor:
        """What these bytes become."""
        return old ^ self.values if self.mask is None else torch.where(self.mask, self.values, old)


class PublishedSource(DeltaSource):
    """Several published versions, folded into one delta.

    Raises:
        RequestRejected: 400, a version is missing, torn, or not of this model.
    """

    def __init__(self, state: PulledState, describe: Describe, device: torch.device) -> None:
        self._chain = read_chain(state.source_dir, state.base, state.target)
        if len({delta.encoding for delta in self._chain}) > 1:
            raise RequestRejected("these versions are encoded in several ways: pull one at a time")
        self._files = [open_files(delta) for delta in self._chain]
        described = {name: describe(name) for name in names_of(self._chain)}
        entries = [
            TensorHeader(name, *(found if found is not None else ((), torch.uint8)))
            for name, found in described.items()
        ]
        super().__init__(entries, {})
        self.base_version = state.base_version
        self._device = device
        # Refused, unless it is of those that the model has no use for.
        self._unknown = frozenset(name for name, found in described.items() if found is None)
        self._changes: dict[str, _Changes] = {}
        self._sums: dict[str, tuple[str, str]] = {}

    def open(self) -> Iterator[int]:
        sizes = {entry.name: entry.num_bytes for entry in self.entries}
        for delta, files in zip(self._chain, self._files, strict=True):
            for file in files.values():
                with file.open():
                    for name, stored in file.tensors.items():
                        if name in self._unknown:
                            continue
                        frame = stored.read().numpy().tobytes()
                        changes = _decoded(delta, name, frame, sizes[name])
                        if name in self._changes:
                            self._changes[name].follow(changes)
                        else:
                            self._changes[name] = changes
                        checksum = delta.checksums.get(name, file.metadata.get(name))
                        if checksum is not None:
                            self._sums[name] = delta.checksum_format, checksum
                        yield sizes[name]

    def verify(self, weights: PatchedWeights) -> Iterator[int]:
        """Hold checksums against what tensors are to become; yields bytes. Not of those that ranks divide.

        Raises:
            RequestRejected: 400, one is another.
        """
        for entry in self.entries:
            destination = weights.destination(entry.name)
            if entry.name not in self._sums or destination is None or destination.part is not None:
                continue
            old = destination.region.reshape(-1).cpu().contiguous().view(torch.uint8)
            new = self._changes[entry.name].apply(old)
            kind, expected = self._sums[entry.name]
            found = checksum_of(new.numpy().data, kind)
            if found != expected:
                raise RequestRejected(
                    f"nothing was written: {entry.name}: its {kind} would be {found}, the trainer's is "
                    f"{expected}: what serves is not what was published, or the files are damaged"
                )
            yield entry.num_bytes

    def place(self, weights: PatchedWeights) -> PlacedChanges:
        patches = [self._patch(entry) for entry in self.entries]
        places = weights.places(self.entries)
        by_byte = [
            place.bytewise() if place is not None and patch.kind is PatchKind.SET else place
            for place, patch in zip(places, patches, strict=True)
        ]
        return PlacedPatches(patches, by_byte)

    def close(self) -> None:
        super().close()
        self._changes = {}

    def _patch(self, entry: TensorHeader) -> Patch:
        if entry.name in self._unknown:
            nothing = torch.empty(0, device=self._device)
            return Patch(entry.name, entry.shape, nothing.long(), nothing)
        changes = self._changes[entry.name]
        if changes.mask is None:
            elements = changes.values.view(BITS[entry.dtype.itemsize])
            positions = elements.nonzero()[:, 0]
            values, kind = elements[positions].view(entry.dtype), PatchKind.XOR
        else:
            positions = changes.mask.nonzero()[:, 0]
            values, kind = changes.values[positions], PatchKind.SET
        where, what = positions.to(self._device), values.to(self._device)
        return Patch(entry.name, entry.shape, where, what, kind)


def _decoded(delta: PublishedDelta, name: str, frame: bytes, num_bytes: int) -> _Changes:
    if delta.encoding == "xor":
        data = bytearray(decompress(frame, num_bytes, name))
        if len(data) != num_bytes:
            raise RequestRejected(
                f"{name[:200]}: the delta is of {len(data)} bytes, the parameter has {num_bytes}: a delta "
                "is of a checkpoint whose dtype is the engine's"
            )
        return _Changes(
            torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8), None
        )
    data = bytearray(decompress(frame, _COUNT_BYTES + 5 * num_bytes, name))
    count = int.from_bytes(data[:_COUNT_BYTES], "little")
    if len(data) != _COUNT_BYTES + 5 * count:
        raise RequestRejected(f"{name[:200]}: {count} positions do not make a delta of {len(data)} bytes")
    mask, values = (torch.zeros(num_bytes, dtype=kind) for kind in (torch.bool, torch.uint8))
    if count:
        end = _COUNT_BYTES * (1 + count)
        positions = torch.frombuffer(data[_COUNT_BYTES:end], dtype=torch.int32).to(torch.int64) & 0xFFFFFFFF
        if int(positions.max()) >= num_bytes:
            raise RequestRejected(
                f"{name[:200]}: byte {int(positions.max())} of a tensor of {num_bytes} bytes"
            )
        mask[positions] = True
        values[positions] = torch.frombuffer(data[end:], dtype=torch.uint8)
    return _Changes(values, mask)
