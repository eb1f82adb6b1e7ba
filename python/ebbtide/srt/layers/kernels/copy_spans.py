"""Many copies by one kernel, which looks at what it copies for NaN and Inf on its way.

Shapes: S spans (copies), R rows of them.
"""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False

from collections.abc import Iterator
from itertools import pairwise
from typing import Final

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

# Spans are cut into rows of a table, of which several programs copy a piece each, in steps.
PIECES: Final = 16
PIECE_BYTES: Final = 256 << 10
STEP_BYTES: Final = 32 << 10
ROW_BYTES: Final = PIECES * PIECE_BYTES


class SpanCopies:
    """So many copies, ready to be launched, on the stream that they were made on.

    Args:
        spans_S5: addresses of source and destination, bytes, and of 32 bits of the source those that are all
            ones in an element that is NaN or Inf, and the lowest of these in each element (zeros: nothing is
            looked for). The first three are multiples of 16. All of that memory must live until the copies
            have run.
        device: where it lies.

    Attributes:
        found_S: once they have run, which of the spans hold NaN or Inf; ones and zeros.
    """

    def __init__(self, spans_S5: NDArray[np.int64], device: torch.device) -> None:
        self._num_spans = len(spans_S5)
        self._device = device
        self._bytes_R, self._host_rows_R6 = _rows(spans_S5)
        self._upload()

    def move(self, source_bytes: int, destination_bytes: int) -> None:
        """Copy from and to addresses that are so much higher: it is as if they were made anew."""
        self._host_rows_R6[:, 0] += source_bytes
        self._host_rows_R6[:, 1] += destination_bytes
        self._upload()

    def _upload(self) -> None:
        # In one transfer: few spans take no longer to copy than to tell of.
        rows_R6 = self._host_rows_R6
        table = torch.empty(
            rows_R6.nbytes + 4 * self._num_spans, dtype=torch.uint8, pin_memory=self._device.type == "cuda"
        )
        host = table.numpy()
        host[: rows_R6.nbytes].view(np.int64)[:] = rows_R6.reshape(-1)
        host[rows_R6.nbytes :] = 0
        table = table.to(self._device, non_blocking=True)
        self._rows_R6 = table[: rows_R6.nbytes].view(torch.int64).view(rows_R6.shape)
        self.found_S = table[rows_R6.nbytes :].view(torch.int32)

    def launch(self, launch_bytes: int) -> Iterator[int]:
        """Launch them, by kernels of about that many bytes each; yields the bytes of each kernel."""
        ends_R = np.cumsum(self._bytes_R)
        bounds = [0, *(np.flatnonzero(np.diff(ends_R // launch_bytes)) + 1), len(ends_R)]
        for first, end in pairwise(bounds):
            if first < end:
                rows = self._rows_R6[first:end]
                _copy_rows[(PIECES * len(rows),)](
                    rows,
                    self.found_S,
                    PIECES=PIECES,
                    WORDS=STEP_BYTES // 4,
                    STEPS=PIECE_BYTES // STEP_BYTES,
                    num_warps=16,
                )
                yield int(self._bytes_R[first:end].sum())


def _rows(spans_S5: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Bytes of each row [R]; source, destination, words of 32 bits, span and what is looked for [R, 6]."""
    num_bytes_S = spans_S5[:, 2]
    num_rows_S = -(-num_bytes_S // ROW_BYTES)
    span_R = np.repeat(np.arange(len(spans_S5)), num_rows_S)
    first_S = np.cumsum(num_rows_S) - num_rows_S
    offset_R = (np.arange(len(span_R)) - first_S[span_R]) * ROW_BYTES
    bytes_R = np.minimum(num_bytes_S[span_R] - offset_R, ROW_BYTES)
    rows_R6 = np.empty((len(span_R), 6), dtype=np.int64)
    rows_R6[:, :2] = spans_S5[span_R, :2] + offset_R[:, None]
    rows_R6[:, 2] = bytes_R // 4
    rows_R6[:, 3] = span_R
    rows_R6[:, 4:] = spans_S5[span_R, 3:]
    return bytes_R, rows_R6


@triton.jit
def _copy_rows(  # type: ignore[no-untyped-def]
    rows_ptr, found_ptr, PIECES: tl.constexpr, WORDS: tl.constexpr, STEPS: tl.constexpr
) -> None:
    program = tl.program_id(0)
    row_ptr = rows_ptr + (program // PIECES).to(tl.int64) * 6
    source_ptr = tl.multiple_of(tl.load(row_ptr).to(tl.pointer_type(tl.int32)), 16)
    destination_ptr = tl.multiple_of(tl.load(row_ptr + 1).to(tl.pointer_type(tl.int32)), 16)
    num_words = tl.multiple_of(tl.load(row_ptr + 2).to(tl.int32), 4)
    ones, lowest = tl.load(row_ptr + 4), tl.load(row_ptr + 5)
    # Where all are ones, adding the lowest carries into the bit above them, which is an element's sign.
    carried = (ones + lowest).to(tl.int32)
    ones, lowest = ones.to(tl.int32), lowest.to(tl.int32)
    first = (program % PIECES) * WORDS * STEPS
    found = tl.zeros((WORDS,), tl.int32)
    for step in range(STEPS):
        word = first + step * WORDS + tl.arange(0, WORDS)
        values = tl.load(source_ptr + word, mask=word < num_words, other=0)
        tl.store(destination_ptr + word, values, mask=word < num_words)
        found |= ((values & ones) + lowest) & carried
    is_found = tl.max((found != 0).to(tl.int32), axis=0) > 0
    tl.store(found_ptr + tl.load(row_ptr + 3), 1, mask=is_found)
