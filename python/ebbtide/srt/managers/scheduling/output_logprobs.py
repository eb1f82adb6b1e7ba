"""Logprobs of output tokens until they are sent: a step adds those of all requests as one array.

Adding them to a list for each request would take longer than all else that a step does.

Shapes: P requests, N tokens, W numbers for a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from ebbtide.srt.managers.io_struct import LogprobColumns
from ebbtide.srt.model_executor.batch_plan import LogprobArrays

if TYPE_CHECKING:
    from ebbtide.srt.managers.scheduling.request import Req

# Numbers that a row has room for: with the 20 most likely tokens, those of 24.
ROW_LEN: Final = 1024


class OutputLogprobs:
    """What running requests have not sent: the last tokens by row of the page table, others with the request.

    The numbers of a token are its logprob, those of the most likely ones, their ids, and the logprobs of the
    ids that the request named: side by side, and float32 as the int32 of the same bits.
    """

    def __init__(self, num_rows: int) -> None:
        # Zeros take no memory until something is written there.
        self._numbers = np.zeros((num_rows, ROW_LEN), dtype=np.int32)
        self._num_used = np.zeros(num_rows, dtype=np.int64)

    def add(
        self,
        positions: LogprobArrays,
        requests: Sequence[Req],
        indices_P: NDArray[np.int64],
        rows_P: NDArray[np.int32],
    ) -> None:
        """One more token of each of the requests with these indices, in these rows.

        Args:
            positions: of those requests alone, as wide as they ask for.
        """
        columns = [column.view(np.int32) for column in positions.columns if column is not None]
        numbers_PW = np.column_stack(columns)
        width = numbers_PW.shape[1]
        num_tokens = ROW_LEN // width
        if not num_tokens:
            for index, numbers in zip(indices_P.tolist(), numbers_PW, strict=True):
                requests[index].unsent_logprobs.append(numbers.tobytes())
            return
        used_P = self._num_used[rows_P]
        by_token = self._numbers[:, : num_tokens * width].reshape(-1, num_tokens, width)
        by_token[rows_P, used_P // width] = numbers_PW
        self._num_used[rows_P] = used_P + width
        for index in indices_P[used_P + 2 * width > ROW_LEN].tolist():
            self.empty(requests[index])

    def empty(self, req: Req) -> None:
        """A running request takes over what is in its row."""
        assert req.kv is not None
        row = req.kv.row
        if self._num_used[row]:
            req.unsent_logprobs.append(self._numbers[row, : self._num_used[row]].tobytes())
            self._num_used[row] = 0

    def take(self, req: Req) -> LogprobColumns | None:
        """All that a request has not sent yet, which is kept no more; None: it asks for none."""
        spec = req.spec.logprobs
        if spec is None:
            return None
        if req.kv is not None:
            self.empty(req)
        numbers = np.frombuffer(b"".join(req.unsent_logprobs), dtype=np.int32)
        req.unsent_logprobs.clear()
        bounds = (0, 1, 1 + spec.top, 1 + 2 * spec.top, 1 + 2 * spec.top + len(spec.token_ids))
        numbers_NW = numbers.reshape(-1, bounds[-1])
        return LogprobColumns(*(numbers_NW[:, start:end].tobytes() for start, end in pairwise(bounds)))
