"""Copies into the weights: launched, and looked at for NaN and Inf."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ebbtide.srt.model_executor.transfers import download

if TYPE_CHECKING:
    from ebbtide.srt.layers.kernels.copy_spans import SpanCopies

# Narrower floating types mean nothing without the scales that belong to them.
CONVERTIBLE: Final = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
# Tensors that are looked at for NaN and Inf by one call.
LOOKED_AT_ONCE: Final = 64
# So much is copied by one kernel: about a millisecond of a device's time.
LAUNCH_BYTES: Final = 2 << 30
# What addresses and lengths of planned copies are multiples of.
ALIGNMENT_BYTES: Final = 16
# The bits that are all ones in NaN and Inf, in the lower and in the upper half of 32 bits.
EXPONENTS: Final = {
    torch.bfloat16: (0x7F80, 0x7F800000),
    torch.float16: (0x7C00, 0x7C000000),
    torch.float32: (0x7F800000, 0x7F800000),
}


@dataclass(frozen=True, slots=True)
class Run:
    """Where a tensor goes that lies in the weights in one piece, as it lies in its own memory.

    Attributes:
        offset: in the arena, in bytes.
        skipped_bytes: of the tensor ahead of what this rank holds of it.
    """

    offset: int
    num_bytes: int
    skipped_bytes: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class PlannedSpans:
    """Copies into weights that begin at an address: good for others of the same tensors, wherever they go.

    Attributes:
        spans_S5: as `SpanCopies` takes them.
    """

    names: tuple[str, ...]
    spans_S5: NDArray[np.int64]
    address: int


class WeightCopies:
    """Copies of tensors that lie in a device's memory as they are to lie in the weights.

    They are planned first, which touches nothing, and then launched by few kernels: launching thousands of
    copies one by one takes longer than copying. Of two for one name the later one counts.

    Args:
        device: where the weights are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans: dict[str, tuple[int, int, int, int, int]] = {}
        self._names: tuple[str, ...] = ()
        self._ready: SpanCopies | None = None
        self._is_found: Tensor | None = None

    def plan(self, name: str, tensor: Tensor, run: Run, arena_address: int) -> bool:
        """Take a tensor into account, which is to live until its copy has run.

        Returns False for one that is not alike, and is to be copied in some other way.
        """
        self._spans.pop(name, None)
        is_alike = tensor.dtype == run.dtype and tensor.is_contiguous() and tensor.device == self._device
        if not is_alike or run.dtype == torch.float64:
            return False
        source, destination = tensor.data_ptr() + run.skipped_bytes, arena_address + run.offset
        if (source | destination | run.num_bytes) % ALIGNMENT_BYTES:
            return False
        self._spans[name] = (source, destination, run.num_bytes, *EXPONENTS.get(run.dtype, (0, 0)))
        return True

    def prepare(self, address: int) -> PlannedSpans | None:
        """Everything is planned: have it ready to be launched, on the stream where that will be.

        Args:
            address: where the weights begin. What is returned may be taken again, for others.
        """
        if not self._spans:
            return None
        spans_S5 = np.array(list(self._spans.values()), dtype=np.int64)
        planned = PlannedSpans(tuple(self._spans), spans_S5, address)
        self.take(planned, address)
        return planned

    def take(self, planned: PlannedSpans, address: int) -> None:
        """In the place of planning: have copies of the same tensors ready, to weights that begin there."""
        from ebbtide.srt.layers.kernels.copy_spans import SpanCopies  # Triton is where GPUs are

        spans_S5 = planned.spans_S5.copy()
        spans_S5[:, 1] += address - planned.address
        self._names, self._ready = planned.names, SpanCopies(spans_S5, self._device)

    def launch(self) -> Iterator[int]:
        """Launch what is ready; yields the bytes of each kernel. To be run to its end."""
        if self._ready is not None:
            yield from self._ready.launch(LAUNCH_BYTES)
            self._is_found = download(self._ready.found_S)

    def nonfinite(self) -> list[str]:
        """Once everything that was launched has run: the names of what holds NaN or Inf."""
        if self._is_found is None:
            return []
        named = zip(self._names, self._is_found.tolist(), strict=True)
        return [name for name, is_found in named if is_found]


def compile_copies(device: torch.device) -> None:
    """Have the kernel ready: an update should not wait for a compiler."""
    tensor = torch.zeros(ALIGNMENT_BYTES, dtype=torch.uint8, device=device)
    copies = WeightCopies(device)
    copies.plan("", tensor, Run(0, tensor.nbytes, 0, tensor.dtype), torch.empty_like(tensor).data_ptr())
    copies.prepare(0)
    for _ in copies.launch():
        pass


class NonFinite:
    """Which of the tensors that were written hold NaN or Inf.

    They are looked at where they are, and what was found is read once. To be used where copies are launched.
    """

    def __init__(self) -> None:
        self._named: list[tuple[str, Tensor]] = []
        self._num_looked_at = 0
        self._norms: list[Tensor] = []
        self._is_finite: Tensor | None = None

    def add(self, name: str, region: Tensor) -> None:
        """To be looked at, now or later. Types without Inf, or that mean nothing without scales, are not."""
        if region.dtype in CONVERTIBLE:
            self._named.append((name, region))
        if len(self._named) - self._num_looked_at == LOOKED_AT_ONCE:
            self._look()

    def finish(self) -> None:
        """All were added: launch what is left, and the reading."""
        self._look()
        if self._norms:
            self._is_finite = download(torch.stack(self._norms).isfinite())

    def names(self) -> list[str]:
        """Once everything that was launched has run."""
        if self._is_finite is None:
            return []
        # A norm may be infinite where nothing else is: only those few are waited for.
        looked_at = zip(self._named, self._is_finite.tolist(), strict=True)
        suspects = [named for named, is_finite in looked_at if not is_finite]
        return [name for name, region in suspects if not bool(region.isfinite().all())]

    def _look(self) -> None:
        regions = [region for _, region in self._named[self._num_looked_at :]]
        self._num_looked_at = len(self._named)
        if regions:
            self._norms += torch._foreach_norm(regions, 2, dtype=torch.float32)
