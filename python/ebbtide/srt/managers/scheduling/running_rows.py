"""The numbers that every step reads and changes, as one column each, indexed by page-table row.

A step handles thousands of requests. With columns that takes a few array operations; a loop over objects
would take longer than the forward pass.

Shapes: R requests of a batch; of logprobs P requests, N tokens, W numbers for a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ebbtide.srt.managers.io_struct import LogprobColumns
from ebbtide.srt.managers.scheduling.request import LONGEST_STREAM_INTERVAL, KVCounts, Req
from ebbtide.srt.model_executor.batch_plan import SAMPLED_BEFORE, BatchPlan, LogprobArrays, Routes

Column = NDArray[np.int64]

PLAIN_STREAM, OTHER_STREAM = 1, 2
# Numbers per row of `OutputLogprobs`: enough for 24 tokens with the 20 most likely alternatives each.
ROW_LEN: Final = 1024


@dataclass(slots=True)
class ScheduledBatch:
    """One forward pass: the plan for the runner, its requests, and those that it admits.

    Attributes:
        serials_R: `RunningRows.serial` of each request's row when the step was planned. If the row has
            another one when the step has run, the request was ended or retracted: its result is dropped.
    """

    requests: list[Req]
    serials_R: NDArray[np.int64]
    plan: BatchPlan
    admitted: list[Req]


class RunningRows(KVCounts):
    """Columns by page-table row. Entries of unused rows mean nothing.

    Attributes:
        serial: number of the request's stay in the row, never used twice; 0: the row is unused.
        num_prompt: tokens of the prompt.
        planned: tokens that are known or in flight.
        limit: the most tokens that prompt and output can have.
        capacity: tokens that the pages have room for.
        last_token: id of the last output token, if none is in flight.
        settled: number of the commit under which `OutputProcessor` last handled the request as an object; −1:
            it is in prefill, or runs on another adapter than before.
        is_followed: 1 if every token must be inspected: there are stop strings or a grammar.
        stream_kind: `PLAIN_STREAM`: each token is sent at once, with logprobs at most; `OTHER_STREAM`; or 0.
        logprob_kind: a number that stands for how many top logprobs and named ids are wanted; 0: no logprobs.
        output_interval: output tokens between two outputs; 0: one output at the end.
        next_output: the total of tokens at which the next output is due.
        num_routed: tokens whose experts were given with the request.
        needs_ids: 1 if the next token depends on the ids of all tokens before it.
        adapter_slot: slot of its adapter; −1: it has none.
        logprobs: of output tokens that were not sent yet.
    """

    def __init__(self, num_rows: int) -> None:
        super().__init__(num_rows)

        def column() -> Column:
            return np.zeros(num_rows, dtype=np.int64)

        self.serial, self.num_prompt, self.planned, self.limit = column(), column(), column(), column()
        self.capacity = column()
        self.last_token, self.settled, self.needs_ids = column(), column(), column()
        self.is_followed, self.stream_kind, self.num_routed = column(), column(), column()
        self.logprob_kind, self.output_interval, self.next_output = column(), column(), column()
        self.adapter_slot = column()
        self.logprobs = OutputLogprobs(num_rows)
        self._num_opened = 0

    def open(self, row: int, req: Req, *, num_computed: int, num_pages_tokens: int) -> None:
        """Give a row to a request. `num_pages_tokens`: tokens that its pages have room for."""
        self._num_opened += 1
        spec = req.spec
        self.serial[row] = self._num_opened
        self.num_prompt[row] = len(spec.prompt_ids)
        self.planned[row] = req.num_tokens
        self.limit[row] = len(spec.prompt_ids) + req.given.max_new_tokens
        self.launched[row] = self.computed[row] = num_computed
        self.capacity[row] = num_pages_tokens
        self.in_flight[row] = 0
        self.last_token[row] = spec.output_ids[-1] if spec.output_ids else 0
        self.settled[row] = -1
        self.needs_ids[row] = spec.needs_output_ids
        self.is_followed[row] = req.stop_strings is not None or spec.mask is not None
        self.stream_kind[row] = _stream_kind(req)
        logprobs = spec.logprobs
        self.logprob_kind[row] = 0 if logprobs is None else (1 + logprobs.top << 32) + len(logprobs.token_ids)
        self.output_interval[row] = req.stream_interval or 0
        # The first token is sent at once.
        num_sent = len(spec.prompt_ids) + req.num_emitted
        self.next_output[row] = num_sent + self.output_interval[row] if req.has_started_output else 0
        self.num_routed[row] = 0 if req.given_routes is None else len(req.given_routes)
        self.set_adapter(row, req)

    def set_adapter(self, row: int, req: Req) -> None:
        """Run the request on its adapter from the next step on; a new span of its output begins there."""
        slot = -1 if req.adapter is None else req.adapter.slot
        assert slot is not None, "a request runs on an adapter that no pass can read"
        self.adapter_slot[row], self.settled[row] = slot, -1

    def close(self, row: int) -> None:
        self.serial[row] = 0

    def missing(self, rows_R: Column) -> Column:
        """Tokens whose KV is neither computed nor in flight; 0 if the last output token is in flight."""
        planned_R = self.planned[rows_R]
        is_done_R = (self.in_flight[rows_R] > 0) & (planned_R >= self.limit[rows_R])
        return np.where(is_done_R, 0, planned_R - self.launched[rows_R])

    def short_of_pages(self, rows_R: Column) -> list[int]:
        """Indices of the rows that need another page for their next token."""
        is_full_R = self.launched[rows_R] >= self.capacity[rows_R]
        found: list[int] = np.flatnonzero(is_full_R & (self.missing(rows_R) > 0)).tolist()
        return found

    def wait_for_ids(self, rows_R: Column) -> bool:
        """Whether the next token of any row depends on ids that are in flight."""
        return bool((self.in_flight[rows_R] * self.needs_ids[rows_R]).any())

    def is_decoding(self, rows_R: Column) -> NDArray[np.bool_]:
        """Whether only the last output token of each row is left to compute."""
        known_R = self.planned[rows_R] - self.in_flight[rows_R]
        is_last_R: NDArray[np.bool_] = known_R - self.computed[rows_R] == 1
        return is_last_R & (known_R > self.num_prompt[rows_R])

    def num_streamed(self, rows_R: Column) -> int:
        """How many of the rows are streamed, as `Req.is_streamed` says."""
        interval_R = self.output_interval[rows_R]
        return int(((interval_R > 0) & (interval_R <= LONGEST_STREAM_INTERVAL)).sum())

    def num_to_come(self, rows_R: Column, window: int | None = None) -> int:
        """The sum of output tokens that may still come, each row within its first `window` tokens."""
        known_R = self.planned[rows_R] - self.in_flight[rows_R]
        limit_R = self.limit[rows_R]
        if window is not None:
            limit_R = np.maximum(np.minimum(limit_R, window), known_R)
        return int((limit_R - known_R).sum())

    def plan(self, requests: Sequence[Req], rows_R: Column, num_new_R: Column) -> BatchPlan:
        """Make the plan of a batch, which counts as launched from here on."""
        starts_R, planned_R = self.launched[rows_R], self.planned[rows_R]
        in_flight_R, num_prompt_R = self.in_flight[rows_R], self.num_prompt[rows_R]
        ends_R = starts_R + num_new_R
        adapters_R = self.adapter_slot[rows_R]
        can_sample_R = self.limit[rows_R] > num_prompt_R
        samples_R = (in_flight_R > 0) | ((ends_R == planned_R) & can_sample_R)
        plan = BatchPlan(
            input_ids_T=self._input_ids(requests, rows_R, starts_R, num_new_R),
            page_rows_R=rows_R.astype(np.int32),
            starts_R=starts_R.astype(np.int32),
            num_new_R=num_new_R.astype(np.int32),
            samples_R=samples_R,
            num_outputs_R=planned_R - num_prompt_R,
            specs=[req.spec for req in requests],
            given_routes=_given_routes(requests, starts_R, ends_R, self.num_routed[rows_R]),
            adapters_R=adapters_R.astype(np.int32) if (adapters_R >= 0).any() else None,
        )
        self.launched[rows_R] = ends_R
        self.planned[rows_R] += samples_R
        self.in_flight[rows_R] += samples_R
        return plan

    def undo(self, plan: BatchPlan) -> None:
        """Take back the plan that was made last."""
        self.launched[plan.page_rows_R] -= plan.num_new_R
        self.planned[plan.page_rows_R] -= plan.samples_R
        self.in_flight[plan.page_rows_R] -= plan.samples_R

    def _input_ids(
        self, requests: Sequence[Req], rows_R: Column, starts_R: Column, num_new_R: Column
    ) -> NDArray[np.int64]:
        """The new token ids, request by request; `SAMPLED_BEFORE` for a token that is still in flight."""
        is_last_R = (num_new_R == 1) & (starts_R + 1 == self.planned[rows_R])
        is_output_R = is_last_R & (starts_R >= self.num_prompt[rows_R])
        singles_R = np.where(self.in_flight[rows_R] > 0, SAMPLED_BEFORE, self.last_token[rows_R])
        if is_output_R.all():
            return singles_R
        firsts_R = np.cumsum(num_new_R) - num_new_R
        input_ids_T = np.empty(int(num_new_R.sum()), dtype=np.int64)
        input_ids_T[firsts_R[is_output_R]] = singles_R[is_output_R]
        for index in np.flatnonzero(~is_output_R).tolist():
            first, start, count = int(firsts_R[index]), int(starts_R[index]), int(num_new_R[index])
            input_ids_T[first : first + count] = requests[index].tokens(start, start + count)
        return input_ids_T


def _given_routes(
    requests: Sequence[Req], starts_R: Column, ends_R: Column, num_routed_R: Column
) -> dict[int, Routes]:
    """The given experts of new tokens, by index of the request."""
    given: dict[int, Routes] = {}
    for index in np.flatnonzero(starts_R < num_routed_R).tolist():
        rows = requests[index].given_routes
        assert rows is not None
        given[index] = rows[int(starts_R[index]) : int(ends_R[index])]
    return given


def _stream_kind(req: Req) -> int:
    if req.stream_interval is None:
        return 0
    return OTHER_STREAM if req.stream_interval != 1 or req.spec.returns_support else PLAIN_STREAM


class OutputLogprobs:
    """Logprobs of output tokens that were not sent yet: the latest by row, earlier ones with the request.

    A step adds those of all requests as one array; a list per request would take longer than all the rest.

    Each token has: its logprob, the top logprobs, their ids, and the logprobs of the ids that the request
    named. They lie side by side as int32; float32 numbers keep their bits.
    """

    def __init__(self, num_rows: int) -> None:
        # Pages of zeros take no memory until they are written to.
        self._numbers = np.zeros((num_rows, ROW_LEN), dtype=np.int32)
        self._num_used = np.zeros(num_rows, dtype=np.int64)

    def add(
        self,
        positions: LogprobArrays,
        requests: Sequence[Req],
        indices_P: NDArray[np.int64],
        rows_P: NDArray[np.int32],
    ) -> None:
        """Add one token for each of P requests that want equally many logprobs.

        Args:
            positions: logprobs of these P requests, only as many as they want.
            indices_P: their indices among `requests`.
            rows_P: their page-table rows.
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
        """Move what is in a running request's row to the request."""
        row = req.hold.row
        if self._num_used[row]:
            req.unsent_logprobs.append(self._numbers[row, : self._num_used[row]].tobytes())
            self._num_used[row] = 0

    def take(self, req: Req) -> LogprobColumns | None:
        """Remove and return all unsent logprobs of a request; None: it wants none."""
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
