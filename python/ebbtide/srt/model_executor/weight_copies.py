"""Copies of tensors into the weights: destinations, planned kernels, and the search for NaN and Inf."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ebbtide.formats.stored_tensor import StoredTensor, copy_into, whole
from ebbtide.srt.layers.fp8 import BLOCK, BLOCKS, CHANNELS, FP8, ScaleLayout, quantize_into
from ebbtide.srt.model_executor.host_copies import download
from ebbtide.srt.models.sharding import Part
from ebbtide.srt.slices import Slices, finish

if TYPE_CHECKING:
    from ebbtide.srt.layers.kernels.copy_spans import SpanCopies
    from ebbtide.srt.layers.kernels.fp8.quantize import QuantizedSpans

AnyTensor = TypeVar("AnyTensor", Tensor, StoredTensor, Tensor | StoredTensor)

# Types that may be converted. Narrower floating types mean nothing without their scales.
CONVERTIBLE: Final = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
# How many tensors one call searches for NaN and Inf.
LOOKED_AT_ONCE: Final = 64
# Bytes that one kernel copies: about a millisecond of a device's time.
LAUNCH_BYTES: Final = 2 << 30
# Addresses and lengths of planned copies are multiples of this.
ALIGNMENT_BYTES: Final = 16
# How many numbers describe a copy, and how many of them, which come first, are addresses and lengths.
SPAN_FIELDS: Final = 7
ALIGNED_FIELDS: Final = 5
# By dtype, as masks over 32 bits of elements: the exponent bits, which are all ones in NaN and Inf, and the
# lowest exponent bit of each element.
EXPONENTS: Final = {
    FP8: (0x7F7F7F7F, 0x01010101),
    torch.bfloat16: (0x7F807F80, 0x00800080),
    torch.float16: (0x7C007C00, 0x04000400),
    torch.float32: (0x7F800000, 0x00800000),
}


@dataclass(frozen=True)
class Destination:
    """Where a tensor goes on this rank.

    Attributes:
        region: the part of a parameter that is written; it may have a wider dtype than the tensor.
        part: the part of the tensor that this rank holds; None: all of it.
        is_first: whether no lower rank holds the same part.
        scales: the scales of a region of 8 bits, into which a wider tensor is quantised; else None.
        layout: of the scales.
    """

    region: Tensor
    part: Part | None
    is_first: bool = True
    scales: Tensor | None = None
    layout: ScaleLayout = BLOCKS

    def is_like(self, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        """Whether such a tensor could be received here directly: byte for byte, in one piece."""
        same = self.part is None and tuple(self.region.shape) == shape and self.region.dtype == dtype
        return same and self.region.is_contiguous()

    def part_of(self, tensor: AnyTensor) -> AnyTensor:
        """This rank's part of a whole tensor."""
        part = self.part
        if part is None:
            return tensor
        if len(part.ranges) == 1:
            return tensor.narrow(part.dim, part.start, part.length)
        pieces: Any = torch.cat([whole(tensor.narrow(part.dim, *each)) for each in part.ranges], part.dim)
        return pieces  # type: ignore[no-any-return]

    def nonfinite_region(self, dtype: torch.dtype) -> Tensor:
        """Where to search for NaN and Inf after a tensor of this dtype was written."""
        return self.region if self.scales is None or dtype == self.region.dtype else self.scales

    def write(self, tensor: Tensor) -> None:
        """Write a whole tensor that the store's `check` accepts."""
        finish(self.write_by_slices(tensor, self.region.nbytes))

    def write_by_slices(self, tensor: Tensor | StoredTensor, slice_bytes: int) -> Slices[None]:
        """As `write`, in slices of about `slice_bytes` of the region."""
        part, region, scales = self.part_of(tensor), self.region, self.scales
        if scales is None or tensor.dtype == region.dtype:
            for piece, room in row_slices(part, region, slice_bytes):
                copy_into(room, piece)
                yield room.nbytes
            return
        first_column = 0
        if self.layout is CHANNELS and self.part is not None and self.part.dim == 1:
            # All ranks need the same scale for a row, so they quantise whole rows.
            part, first_column = tensor, self.part.start
        for piece, room in row_slices(part, region, slice_bytes, multiple_of=BLOCK):
            num_scales = -(-len(room) // self.layout.block_rows)
            quantize_into(room, scales[:num_scales], whole(piece), self.layout, first_column)
            scales = scales[num_scales:]
            yield room.nbytes


def row_slices(
    source: Tensor | StoredTensor, destination: Tensor, slice_bytes: int, multiple_of: int = 1
) -> Iterator[tuple[Tensor | StoredTensor, Tensor]]:
    """Cut two tensors of one shape into pairs of row ranges, of about `slice_bytes` in the destination."""
    if destination.nbytes <= slice_bytes or source.dim() == 0:
        yield source, destination
        return
    num_rows = slice_bytes // max(1, destination[:1].nbytes)
    num_rows = max(multiple_of, num_rows // multiple_of * multiple_of)
    pieces = torch.split(source, num_rows) if isinstance(source, Tensor) else source.split(num_rows)
    yield from zip(pieces, torch.split(destination, num_rows), strict=True)


@dataclass(frozen=True, slots=True)
class Run:
    """A contiguous range of the weights that a tensor is copied to.

    Attributes:
        offset: of the range in the arena, in bytes.
        skipped_bytes: bytes of the tensor before the part that this rank holds.
        line_bytes, step_bytes: the part consists of lines of `line_bytes` that begin `step_bytes` apart; 0
            and 0: it is contiguous.
    """

    offset: int
    num_bytes: int
    skipped_bytes: int
    dtype: torch.dtype
    line_bytes: int = 0
    step_bytes: int = 0

    def span(self, address: int, arena_address: int) -> tuple[int, ...]:
        """The copy from a tensor at `address` into weights at `arena_address`, as `SpanCopies` takes it."""
        masks = EXPONENTS.get(self.dtype, (0, 0))
        source, destination = address + self.skipped_bytes, arena_address + self.offset
        return source, destination, self.num_bytes, self.line_bytes, self.step_bytes, *masks


class RunTable:
    """Where the tensors of a table go, if they are copied byte for byte.

    Args:
        runs: one for each tensor; None: it is copied in another way.

    Attributes:
        is_run_T: which tensors have a run.
    """

    def __init__(self, runs: Sequence[Run | None]) -> None:
        self.is_run_T = np.array([run is not None for run in runs], dtype=bool)
        listed = [_NOWHERE if run is None else run for run in runs]
        self._spans_T7 = np.array([run.span(0, 0) for run in listed], dtype=np.int64).reshape(-1, SPAN_FIELDS)

    def spans(
        self, address_T: NDArray[np.int64], arena_address: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The indices of tensors that can be copied from these addresses [S], and their spans [S, 7]."""
        spans_T7 = self._spans_T7.copy()
        spans_T7[:, 0] += address_T
        spans_T7[:, 1] += arena_address
        is_aligned_T = np.bitwise_or.reduce(spans_T7[:, :ALIGNED_FIELDS], axis=1) % ALIGNMENT_BYTES == 0
        chosen_S = np.flatnonzero(self.is_run_T & is_aligned_T)
        return chosen_S, spans_T7[chosen_S]


_NOWHERE: Final = Run(0, 0, 0, torch.uint8)


@dataclass(slots=True)
class PlannedSpans:
    """Prepared copies, which can be moved to other addresses and launched again for the same tensors.

    Attributes:
        names: of the tensors that are copied, then of those that are quantised.
        ready: the prepared launches.
        address: where the weights begin.
        origin: the address that the tensors' addresses are relative to.
    """

    names: tuple[str, ...]
    ready: list[SpanCopies | QuantizedSpans]
    address: int
    origin: int

    def is_for(self, origin: int) -> bool:
        """Whether the copies also serve this origin: all addresses must stay aligned."""
        return (origin - self.origin) % ALIGNMENT_BYTES == 0


class WeightCopies:
    """Copies, by few kernels, of tensors on the device: byte for byte, or quantised from bfloat16.

    Copies are planned first, which touches no memory, and then launched together: launching thousands of
    copies one by one would take longer than copying. If a name is planned twice, the later plan counts.

    Args:
        device: where the weights are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tables: list[tuple[list[str], NDArray[np.int64]]] = []
        self._spans: dict[str, tuple[int, ...]] = {}
        self._quantized: dict[str, tuple[int, ...]] = {}
        self._names: tuple[str, ...] = ()
        self._ready: list[SpanCopies | QuantizedSpans] = []
        self._is_found: Tensor | None = None

    def plan(self, name: str, tensor: Tensor, run: Run, arena_address: int) -> bool:
        """Plan the copy of a tensor, which must live until the copy has run.

        Returns False if the tensor must be copied in another way: its dtype, layout or device differs.
        """
        self._forget(name)
        is_alike = tensor.dtype == run.dtype and tensor.is_contiguous() and tensor.device == self._device
        if not is_alike or run.dtype == torch.float64:
            return False
        span = run.span(tensor.data_ptr(), arena_address)
        if any(field % ALIGNMENT_BYTES for field in span[:ALIGNED_FIELDS]):
            return False
        self._spans[name] = span
        return True

    def plan_table(
        self, names: Sequence[str], address_T: NDArray[np.int64], runs: RunTable, arena_address: int
    ) -> list[int]:
        """As `plan`, for contiguous tensors on the device at these addresses; names must be unique.

        Returns the indices of the tensors that must be copied in another way.
        """
        chosen_S, spans_S7 = runs.spans(address_T, arena_address)
        self._tables.append(([names[index] for index in chosen_S.tolist()], spans_S7))
        left_T = np.ones(len(names), dtype=bool)
        left_T[chosen_S] = False
        left: list[int] = np.flatnonzero(left_T).tolist()
        return left

    def plan_quantized(self, name: str, part: Tensor, region: Tensor, scales: Tensor) -> bool:
        """As `plan`, for this rank's part of a tensor, which is quantised into region and scales."""
        self._forget(name)
        is_alike = part.dtype == torch.bfloat16 and region.dtype == FP8 and part.device == self._device
        if not (is_alike and part.dim() == 2 and part.stride(1) == region.stride(1) == scales.stride(1) == 1):
            return False
        addresses = part.data_ptr(), region.data_ptr(), scales.data_ptr()
        steps = part.stride(0), region.stride(0), scales.stride(0)
        if (addresses[0] | addresses[1] | 2 * steps[0] | steps[1]) % ALIGNMENT_BYTES:
            return False
        if part.shape[0] % BLOCK or part.shape[1] % BLOCK:
            return False
        self._quantized[name] = (*addresses, part.shape[0] // BLOCK, part.shape[1] // BLOCK, *steps)
        return True

    def _forget(self, name: str) -> None:
        self._spans.pop(name, None)
        self._quantized.pop(name, None)

    def prepare(self, address: int, origin: int = 0) -> PlannedSpans | None:
        """Prepare the launch of everything that was planned, on the stream where it will run.

        Args:
            address: where the weights begin.
            origin: the address that the tensors' addresses are relative to. The result can be given to `take`
                later, for tensors at the same distances from another origin.
        """
        # Triton is only installed with GPUs.
        from ebbtide.srt.layers.kernels.copy_spans import SpanCopies
        from ebbtide.srt.layers.kernels.fp8.quantize import QuantizedSpans

        tables = [*self._tables, (list(self._spans), _table(self._spans, SPAN_FIELDS))]
        self._names = (*(name for listed, _ in tables for name in listed), *self._quantized)
        if not self._names:
            return None
        spans_S7 = np.concatenate([spans for _, spans in tables])
        if len(spans_S7):
            self._ready.append(SpanCopies(spans_S7, self._device))
        if self._quantized:
            self._ready.append(QuantizedSpans(_table(self._quantized, 8), self._device))
        return PlannedSpans(self._names, self._ready, address, origin)

    def take(self, planned: PlannedSpans, address: int, origin: int = 0) -> None:
        """Instead of planning, reuse copies of the same tensors that `prepare` has returned."""
        for ready in planned.ready:
            ready.move(origin - planned.origin, address - planned.address)
        planned.address, planned.origin = address, origin
        self._names, self._ready = planned.names, planned.ready

    def launch(self, cost: int = 1) -> Slices[None]:
        """Launch what was prepared; yields the bytes of each kernel. It must be run to its end.

        Args:
            cost: how many times as long the copies take as from the device's own memory.
        """
        for ready in self._ready:
            yield from ready.launch(LAUNCH_BYTES // cost)
        found = [ready.found_S for ready in self._ready]
        if found:
            self._is_found = download(found[0] if len(found) == 1 else torch.cat(found))

    def nonfinite(self) -> list[str]:
        """The names of tensors with NaN or Inf. Call it after all copies have run."""
        if self._is_found is None:
            return []
        return [self._names[index] for index in np.flatnonzero(self._is_found.numpy()).tolist()]


def _table(spans: dict[str, tuple[int, ...]], width: int) -> NDArray[np.int64]:
    return np.array(list(spans.values()), dtype=np.int64).reshape(-1, width)


def compile_copies(device: torch.device, *, of_lines: bool) -> None:
    """Compile the copy kernels, so that no update waits for that. `of_lines`: also those of lines."""
    tensor = torch.zeros(ALIGNMENT_BYTES, dtype=torch.uint8, device=device)
    address = torch.empty_like(tensor).data_ptr()
    for line_bytes in (0, ALIGNMENT_BYTES) if of_lines else (0,):
        copies = WeightCopies(device)
        copies.plan("", tensor, Run(0, tensor.nbytes, 0, tensor.dtype, line_bytes, line_bytes), address)
        _run_through(copies)


def compile_quantizing(device: torch.device) -> None:
    """Compile the kernels that quantise weights."""
    weight = torch.zeros((BLOCK, BLOCK), dtype=torch.bfloat16, device=device)
    values = torch.empty_like(weight, dtype=FP8)
    scales = torch.empty((1, 1), dtype=torch.float32, device=device)
    quantize_into(values, scales, weight)
    copies = WeightCopies(device)
    copies.plan_quantized("", weight, values, scales)
    _run_through(copies)


def _run_through(copies: WeightCopies) -> None:
    copies.prepare(0)
    finish(copies.launch())


class NonFinite:
    """Finds which of the written tensors hold NaN or Inf.

    Tensors are searched on their device, and the result is read once. Use it on the stream of the copies.
    """

    def __init__(self) -> None:
        self._named: list[tuple[str, Tensor]] = []
        self._num_looked_at = 0
        self._norms: list[Tensor] = []
        self._in_eight_bits: list[tuple[str, Tensor]] = []
        self._is_good: Tensor | None = None

    def add(self, name: str, region: Tensor) -> None:
        """Search a region, now or with later ones. Types without NaN and Inf are skipped."""
        if region.dtype == FP8:
            self._in_eight_bits.append((name, _has_no_nan(region)))
        elif region.dtype in CONVERTIBLE:
            self._named.append((name, region))
        if len(self._named) - self._num_looked_at == LOOKED_AT_ONCE:
            self._look()

    def finish(self) -> None:
        """After the last `add`, launch the rest of the search, and the copy of its result to the host."""
        self._look()
        found = [torch.stack(self._norms).isfinite()] if self._norms else []
        if self._in_eight_bits:
            found.append(torch.stack([is_good for _, is_good in self._in_eight_bits]))
        if found:
            self._is_good = download(torch.cat(found))

    def names(self) -> list[str]:
        """The tensors with NaN or Inf. Call it after all launched work has run."""
        if self._is_good is None:
            return []
        is_good = self._is_good.tolist()
        # A norm may overflow although all elements are finite: check those few again, and wait for that.
        suspects = [named for named, good in zip(self._named, is_good, strict=False) if not good]
        names = [name for name, region in suspects if not bool(region.isfinite().all())]
        of_nan = zip(self._in_eight_bits, is_good[len(self._named) :], strict=True)
        return names + [name for (name, _), good in of_nan if not good]

    def _look(self) -> None:
        regions = [region for _, region in self._named[self._num_looked_at :]]
        self._num_looked_at = len(self._named)
        if regions:
            self._norms += torch._foreach_norm(regions, 2, dtype=torch.float32)


def _has_no_nan(region: Tensor) -> Tensor:
    """Whether FP8 values hold no NaN, which has the largest bits of either sign; a bool on their device."""
    if region.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=region.device)
    return (region.view(torch.int8).max() < 0x7F) & (region.view(torch.uint8).max() < 0xFF)
