"""Many copies by few kernels, which also look for NaN and Inf in the data that they copy.

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

# Spans are cut into rows of a table. Of each row, PIECES programs copy one piece each, in steps.
PIECES: Final = 16
PIECE_BYTES: Final = 256 << 10
STEP_BYTES: Final = 32 << 10
ROW_BYTES: Final = PIECES * PIECE_BYTES
# The number of fields of a row, and which field has the length of a line.
ROW_FIELDS: Final = 9
LINE: Final = 7


class SpanCopies:
    """Prepared copies, which can be launched on the stream on which they were made.

    Args:
        spans_S7: the addresses of source and destination; number of bytes; the bytes of a line of the source,
            and from the start of a line to the next one (0: the source is contiguous); for every 32 bits of
            the source, a mask of the bits that are all ones in an element that is NaN or Inf, and of the
            lowest of these bits in each element (0: nothing is looked for). The first five are multiples of
            16. All that memory must live until the copies are done.
        device: of all memory.

    Attributes:
        found_S: once the copies are done, 1 for spans with NaN or Inf, otherwise 0.
    """

    def __init__(self, spans_S7: NDArray[np.int64], device: torch.device) -> None:
        self._num_spans = len(spans_S7)
        self._device = device
        self._bytes_R, self._host_rows_R9 = _rows(spans_S7)
        self._num_whole = int((self._host_rows_R9[:, LINE] == 0).sum())
        self._upload()

    def move(self, source_bytes: int, destination_bytes: int) -> None:
        """Shift all source and destination addresses by this many bytes. `found_S` starts anew."""
        self._host_rows_R9[:, 0] += source_bytes
        self._host_rows_R9[:, 1] += destination_bytes
        self._upload()

    def _upload(self) -> None:
        # One transfer of everything, since with few spans the transfer takes as long as the copies.
        rows_R9 = self._host_rows_R9
        table = torch.empty(
            rows_R9.nbytes + 4 * self._num_spans, dtype=torch.uint8, pin_memory=self._device.type == "cuda"
        )
        host = table.numpy()
        host[: rows_R9.nbytes].view(np.int64)[:] = rows_R9.reshape(-1)
        host[rows_R9.nbytes :] = 0
        table = table.to(self._device, non_blocking=True)
        self._rows_R9 = table[: rows_R9.nbytes].view(torch.int64).view(rows_R9.shape)
        self.found_S = table[rows_R9.nbytes :].view(torch.int32)

    def launch(self, launch_bytes: int) -> Iterator[int]:
        """Launch the copies, as kernels of about `launch_bytes` each. Yields the bytes of each kernel."""
        num_whole = self._num_whole
        parts = ((False, 0, num_whole), (True, num_whole, len(self._bytes_R)))
        for of_lines, first_row, end_row in parts:
            bytes_R = self._bytes_R[first_row:end_row]
            ends_R = np.cumsum(bytes_R)
            bounds = [0, *(np.flatnonzero(np.diff(ends_R // launch_bytes)) + 1), len(ends_R)]
            for first, end in pairwise(bounds):
                if first < end:
                    self._launch(slice(first_row + first, first_row + end), of_lines=of_lines)
                    yield int(bytes_R[first:end].sum())

    def _launch(self, chosen: slice, *, of_lines: bool) -> None:
        rows = self._rows_R9[chosen]
        _copy_rows[(PIECES * len(rows),)](
            rows,
            self.found_S,
            PIECES=PIECES,
            WORDS=STEP_BYTES // 4,
            STEPS=PIECE_BYTES // STEP_BYTES,
            FIELDS=ROW_FIELDS,
            OF_LINES=of_lines,
            num_warps=16,
        )


def _rows(spans_S7: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The bytes of each row [R], and the rows [R, 9], those of contiguous spans first.

    Fields: source, destination, number of 32-bit words, span, the two masks; then for lines, in units of 16
    bytes: how much of the span comes before this row, a line, and from one line to the next.
    """
    num_bytes_S = spans_S7[:, 2]
    num_rows_S = -(-num_bytes_S // ROW_BYTES)
    span_R = np.repeat(np.arange(len(spans_S7)), num_rows_S)
    first_S = np.cumsum(num_rows_S) - num_rows_S
    offset_R = (np.arange(len(span_R)) - first_S[span_R]) * ROW_BYTES
    bytes_R = np.minimum(num_bytes_S[span_R] - offset_R, ROW_BYTES)
    is_whole_R = spans_S7[span_R, 3] == 0
    rows_R9 = np.empty((len(span_R), ROW_FIELDS), dtype=np.int64)
    rows_R9[:, 0] = spans_S7[span_R, 0] + np.where(is_whole_R, offset_R, 0)
    rows_R9[:, 1] = spans_S7[span_R, 1] + offset_R
    rows_R9[:, 2] = bytes_R // 4
    rows_R9[:, 3] = span_R
    rows_R9[:, 4:6] = spans_S7[span_R, 5:]
    rows_R9[:, 6] = offset_R // 16
    rows_R9[:, LINE:] = spans_S7[span_R, 3:5] // 16
    order_R = np.argsort(~is_whole_R, kind="stable")
    return bytes_R[order_R], rows_R9[order_R]


# Alignment of a kernel's first row differs between updates, and must not make an update wait for a compiler.
@triton.jit(do_not_specialize_on_alignment=["rows_ptr", "found_ptr"])
def _copy_rows(  # type: ignore[no-untyped-def]
    rows_ptr,
    found_ptr,
    PIECES: tl.constexpr,
    WORDS: tl.constexpr,
    STEPS: tl.constexpr,
    FIELDS: tl.constexpr,
    OF_LINES: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    row_ptr = rows_ptr + (program // PIECES).to(tl.int64) * FIELDS
    source_ptr = tl.multiple_of(tl.load(row_ptr).to(tl.pointer_type(tl.int32)), 16)
    destination_ptr = tl.multiple_of(tl.load(row_ptr + 1).to(tl.pointer_type(tl.int32)), 16)
    num_words = tl.multiple_of(tl.load(row_ptr + 2).to(tl.int32), 4)
    ones, lowest = tl.load(row_ptr + 4), tl.load(row_ptr + 5)
    # If all bits of the mask are ones, adding the lowest carries into the bit above them, the element's sign.
    carried = (ones + lowest).to(tl.int32)
    ones, lowest = ones.to(tl.int32), lowest.to(tl.int32)
    first = (program % PIECES) * WORDS * STEPS
    if OF_LINES:
        before, line = tl.load(row_ptr + 6).to(tl.int32), tl.load(row_ptr + 7).to(tl.int32)
        apart = tl.load(row_ptr + 8).to(tl.int32)
        found = tl.zeros((WORDS // 4, 4), tl.int32)
        for step in range(STEPS):
            group = first // 4 + step * (WORDS // 4) + tl.arange(0, WORDS // 4)
            place = before + group
            from_group = (place // line) * apart + place % line
            word = tl.arange(0, 4)[None, :]
            is_inside = (group < num_words // 4)[:, None]
            values = tl.load(source_ptr + (from_group[:, None] * 4 + word), mask=is_inside, other=0)
            tl.store(destination_ptr + (group[:, None] * 4 + word), values, mask=is_inside)
            found |= ((values & ones) + lowest) & carried
    else:
        found = tl.zeros((WORDS,), tl.int32)
        for step in range(STEPS):
            word = first + step * WORDS + tl.arange(0, WORDS)
            values = tl.load(source_ptr + word, mask=word < num_words, other=0)
            tl.store(destination_ptr + word, values, mask=word < num_words)
            found |= ((values & ones) + lowest) & carried
    is_found = tl.max((found != 0).to(tl.int32)) > 0
    tl.store(found_ptr + tl.load(row_ptr + 3), 1, mask=is_found)
