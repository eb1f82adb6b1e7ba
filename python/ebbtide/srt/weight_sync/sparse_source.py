"""Weight sources that bring what changed, and not the weights. Source: wire_vllm section 5."""

from __future__ import annotations

import math
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Final, Protocol, TypeAlias

import torch
from torch import Tensor

from ebbtide.formats.announcement import ChangedTensor
from ebbtide.formats.delta import BITS, ESCAPES, MAX_ELEMENTS, decode_positions
from ebbtide.formats.stored_tensor import whole
from ebbtide.formats.tensor_refs import TensorHeader
from ebbtide.srt.config import ONE_RANK, ParallelConfig
from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.model_executor.weight_copies import NonFinite
from ebbtide.srt.weight_sync.cuda_memory import CudaIpc
from ebbtide.srt.weight_sync.delta.patch import Patch, PatchedWeights, Place
from ebbtide.srt.weight_sync.source import WeightSource
from ebbtide.srt.weight_sync.tensor_source import SAFETENSORS, is_safetensors, open_by_slices

CODES: Final = "codes"
VALUES: Final = "values"
_CHECKSUM: Final = re.compile("[0-9a-f]{16}")
# What a device reads and writes of its memory for one element.
LINE_BYTES: Final = 64


class PlacedChanges(Protocol):
    """What changes of several tensors, and where on this rank."""

    def sums_after(self, known: Sequence[int | None]) -> Generator[int, None, Tensor]:
        """This rank's share of each tensor's `state_sum` as it is to be, int64; yields bytes.

        Args:
            known: its share as it is, where that need not be summed up.
        """
        ...

    def apply(self) -> Iterator[int]:
        """Write what is this rank's; yields bytes of it."""
        ...

    def nonfinite(self) -> list[int]:
        """Once that has run: the tensors of which a value is NaN or Inf."""
        ...


class DeltaSource(WeightSource, ABC):
    """A set of changes on their way into the engine. Open it before it is placed.

    Attributes:
        checksums: by the name of a tensor, what its `state_sum` is to be.
        form: the same for sources of the same headers, and of no others; None: nothing is the same.
        needs_own_dtype: whether it is of the bits of parameters, and means nothing for another dtype.
    """

    needs_own_dtype = True
    form: Hashable = None

    def __init__(self, entries: Sequence[TensorHeader], checksums: Mapping[str, int]) -> None:
        super().__init__(entries, tuple)
        self.checksums = checksums

    @property
    def near_bytes(self) -> int:
        """How much a device moves to write them, which are brought there before: unknown, and so much."""
        return sys.maxsize

    def verify(self, weights: PatchedWeights) -> Iterator[int]:
        """Check on this rank what tensors are to become; yields bytes. Nothing is written.

        Raises:
            RequestRejected: 400, that is not what the sender says.
        """
        return iter(())

    @abstractmethod
    def place(self, weights: PatchedWeights) -> PlacedChanges:
        """The changes where they belong."""


class PlacedPatches:
    """Patches, each of a tensor of its own or written after the last one of it."""

    def __init__(self, patches: Sequence[Patch], places: Sequence[Place | None]) -> None:
        self._pairs = list(zip(patches, places, strict=True))
        self._nonfinite = NonFinite()

    def sums_after(self, known: Sequence[int | None]) -> Generator[int, None, Tensor]:
        sums = []
        for (patch, place), before in zip(self._pairs, known, strict=True):
            share = patch.positions.new_zeros(()) if place is None else place.sum_after(patch, before)
            sums.append(share)
            yield patch.values.nbytes
        return torch.stack(sums) if sums else torch.zeros(0, dtype=torch.int64)

    def apply(self) -> Iterator[int]:
        for index, (patch, place) in enumerate(self._pairs):
            if place is not None:
                self._nonfinite.add(str(index), place.apply(patch))
            yield patch.values.nbytes
        self._nonfinite.finish()

    def nonfinite(self) -> list[int]:
        return [int(index) for index in self._nonfinite.names()]


_Placing: TypeAlias = Callable[[PatchedWeights], PlacedChanges]


class CodedSource(DeltaSource):
    """Changes as the trainer's `WeightSender` codes them: see `encode_positions`.

    Args:
        payload: of two tensors, the codes and the values of all of `changed`.
        device: where the weights are.

    Raises:
        RequestRejected: 400, payload and header do not belong together.
    """

    def __init__(
        self,
        changed: Sequence[ChangedTensor],
        payload: WeightSource,
        device: torch.device,
        base_version: str | None = None,
    ) -> None:
        try:
            codes, values = _codes_and_values(payload)
            _check_header(changed, codes, values)
        except RequestRejected:
            payload.close()
            raise
        entries = [TensorHeader(each.name, each.shape, values.dtype) for each in changed]
        checksums = {each.name: int(each.checksum, 16) for each in changed if each.checksum is not None}
        super().__init__(entries, checksums)
        self._names = [each.name for each in changed]
        self.form = (values.dtype, *self._names, *(each.shape for each in changed))
        self.base_version = base_version
        self._changed = changed
        self._payload = payload
        self._device = device
        self._codes = self._values = torch.empty(0)
        self._place: _Placing | None = None

    @cached_property
    def near_bytes(self) -> int:
        touched = [
            -math.expm1(-each.num_changed * LINE_BYTES / max(1, entry.num_bytes)) * entry.num_bytes
            for each, entry in zip(self._changed, self.entries, strict=True)
        ]
        return int(sum(touched))

    def open(self) -> Iterator[int]:
        yield from self._payload.open()
        tensors = {name: whole(tensor).to(self._device) for name, tensor in self._payload}
        self._codes, self._values = tensors[CODES], tensors[VALUES]
        yield self._values.nbytes
        self._place = self._place_blocks() if self._device.type == "cuda" else self._place_patches()

    def place(self, weights: PatchedWeights) -> PlacedChanges:
        assert self._place is not None, "it is opened first"
        return self._place(weights)

    def release(self) -> Iterator[int]:
        self._forget()
        yield from self._payload.release()

    def detach(self) -> Generator[int, None, None]:
        self._forget()
        return self._payload.detach()

    def close(self) -> None:
        super().close()
        self._forget()
        self._payload.close()

    def _forget(self) -> None:
        self._codes = self._values = torch.empty(0)
        self._place = None

    def _place_patches(self) -> _Placing:
        codes = torch.split(self._codes, [each.num_codes for each in self._changed])
        values = torch.split(self._values, [each.num_changed for each in self._changed])
        patches = [
            Patch(each.name, each.shape, decode_positions(code), value)
            for each, code, value in zip(self._changed, codes, values, strict=True)
        ]
        for patch in patches:
            last = int(patch.positions[-1]) if len(patch.positions) else -1
            _check_positions(patch.name, patch.shape, last, len(patch.positions), len(patch.values))
        return lambda weights: PlacedPatches(patches, weights.places(self.entries))

    def _place_blocks(self) -> _Placing:
        # Triton is there where CUDA is.
        from ebbtide.srt.weight_sync.delta.kernels import PlacedBlocks, coded_blocks

        blocks = coded_blocks(self._codes, [each.num_codes for each in self._changed])
        for each, last, num_values in zip(self._changed, blocks.lasts, blocks.num_values, strict=True):
            _check_positions(each.name, each.shape, last, num_values, each.num_changed)
        values, base_dtype = self._values, BITS[self._values.dtype.itemsize]
        return lambda weights: PlacedBlocks(
            blocks, values, weights.table(self._names), weights.base(base_dtype)
        )


def open_sparse(
    entries: Sequence[bytes | str],
    changed: Sequence[ChangedTensor] | None,
    device: torch.device,
    *,
    base_version: str | None = None,
    place: ParallelConfig = ONE_RANK,
    cuda: CudaIpc | None = None,
) -> Generator[int, None, CodedSource]:
    """Opens this rank's part of `serialized_named_tensors` of the format `sparse`, by slices.

    Args:
        entries: as `open_tensor_payload` takes them, in whichever form; every rank gets all changes.
        changed: the request's field.

    Raises:
        RequestRejected: 400.
    """
    if changed is None:
        raise RequestRejected("changed: load_format sparse needs it, one entry per tensor")
    # Entries of other ranks are left empty where each rank has one of its own.
    is_image = any(entry and is_safetensors(entry) for entry in entries)
    payload = yield from open_by_slices(entries, SAFETENSORS if is_image else None, place=place, cuda=cuda)
    return CodedSource(changed, payload, device, base_version)


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
    for header, told in (
        (codes, sum(each.num_codes for each in changed)),
        (values, sum(each.num_changed for each in changed)),
    ):
        if header.shape != (told,):
            raise RequestRejected(
                f"{header.name}: expected [{told}] as `changed` says, got {list(header.shape)}"
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
