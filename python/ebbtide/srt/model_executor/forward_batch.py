"""A batch plan turned into the tensors of one forward pass.

Shapes: T tokens, R requests, P pages, S sampled requests, M prompt positions with logprobs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ebbtide.srt.layers.attention.base import GroupPages, PagedBatch
from ebbtide.srt.layers.attention.shared_runs import SharedRuns, runs_of_neighbours
from ebbtide.srt.layers.heads import Pages
from ebbtide.srt.layers.state import PIECE_TOKENS, StateStep
from ebbtide.srt.mem_cache.kv_pool import StatePool
from ebbtide.srt.model_executor.batch_plan import SAMPLED_BEFORE, BatchPlan
from ebbtide.srt.model_executor.host_copies import upload


@dataclass(frozen=True, slots=True)
class PromptRows:
    """The prompt positions of one request whose logprobs this pass yields.

    Attributes:
        request: index in the plan.
        first_row: row of the pass that predicts the first of them; the others follow.
        token_ids: the prompt's tokens at these positions.
    """

    request: int
    first_row: int
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """The positions, slots and pages of a plan's tokens, on the host.

    Attributes:
        positions_T: int64.
        slots_GT: int64, by group of layers; a slot is page · page_size + offset in the pool.
        lens_R: int32, all tokens of each request, with the new ones.
        page_table_GRP: int32 page ids by group, as wide as the longest request needs.
        kv_indices_GI: int32 by group, the page ids of all requests, request by request.
        kv_indptr_R1: int32, where each request's pages begin in `kv_indices_GI`; the last entry is the end.
        last_page_len_R: int32, tokens in each request's last page, 1 .. page_size.
    """

    positions_T: NDArray[np.int64]
    slots_GT: Sequence[NDArray[np.int64]]
    lens_R: NDArray[np.int32]
    page_table_GRP: Sequence[NDArray[np.int32]]
    kv_indices_GI: Sequence[NDArray[np.int32]]
    kv_indptr_R1: NDArray[np.int32]
    last_page_len_R: NDArray[np.int32]

    @classmethod
    def of(cls, plan: BatchPlan, page_tables: NDArray[np.int32], page_size: int) -> Self:
        """Lay out a plan; `page_tables` [groups, rows, max_pages] are indexed by the plan's `page_rows_R`."""
        num_new_R, starts_R = plan.num_new_R, plan.starts_R
        lens_R = starts_R + num_new_R
        num_pages_R = -(-lens_R // page_size)
        width = int(num_pages_R.max())
        # Group by group: gathering from all of them at once takes numpy ten times as long.
        tables = [page_table[plan.page_rows_R, :width] for page_table in page_tables]
        # Row t of request r is at position t + (starts_r − first row of r).
        firsts_R = np.cumsum(num_new_R, dtype=np.int64) - num_new_R
        positions_T = np.arange(len(plan.input_ids_T)) + np.repeat(starts_R - firsts_R, num_new_R)
        requests_T = np.repeat(np.arange(len(num_new_R)), num_new_R)
        indices_T, offsets_T = positions_T // page_size, positions_T % page_size
        is_page_RP = np.arange(width) < num_pages_R[:, None]
        return cls(
            positions_T=positions_T,
            slots_GT=[
                table_RP[requests_T, indices_T].astype(np.int64) * page_size + offsets_T
                for table_RP in tables
            ],
            lens_R=lens_R,
            page_table_GRP=tables,
            kv_indices_GI=[table_RP[is_page_RP] for table_RP in tables],
            kv_indptr_R1=_indptr(num_pages_R),
            last_page_len_R=(lens_R - 1) % page_size + 1,
        )


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The tensors of one forward pass.

    Attributes:
        input_ids_T: int64; `SAMPLED_BEFORE` where the step before samples the token.
        rows_T: int64, the page row of each token's request.
        positions_T: int64.
        paged: the pages that attention reads.
        sampled_R: indices of the requests that sample, ascending.
        sampled_rows_S: int64, the rows whose logits are sampled.
        sampled_page_rows_S: int64, the page rows of these requests.
        prompt_rows: rows that give prompt logprobs; usually empty.
    """

    input_ids_T: Tensor
    rows_T: Tensor
    positions_T: Tensor
    paged: PagedBatch
    sampled_R: list[int]
    sampled_rows_S: Tensor
    sampled_page_rows_S: Tensor
    prompt_rows: list[PromptRows]

    @classmethod
    def from_plan(
        cls,
        plan: BatchPlan,
        page_tables: NDArray[np.int32],
        page_size: int,
        device: torch.device = torch.device("cpu"),  # noqa: B008
    ) -> Self:
        """Lay out a plan, and send it to the device."""
        layout = BatchLayout.of(plan, page_tables, page_size)
        q_indptr_R1 = _indptr(plan.num_new_R)
        ends_R = q_indptr_R1[1:].astype(np.int64)
        rows_R = plan.page_rows_R.astype(np.int64)

        def sent(array: NDArray[Any]) -> Tensor:
            return upload(array, device)

        tables = zip(layout.page_table_GRP, layout.slots_GT, layout.kv_indices_GI, strict=True)
        first, *others = [GroupPages(table, sent(slots), sent(indices)) for table, slots, indices in tables]
        paged = PagedBatch(
            num_new_R=plan.num_new_R,
            lens_R=layout.lens_R,
            page_table_RP=first.page_table_RP,
            kv_indptr_R1=layout.kv_indptr_R1,
            q_indptr_R1=q_indptr_R1,
            last_page_len_R=layout.last_page_len_R,
            slots_T=first.slots_T,
            pages=Pages(
                sent(q_indptr_R1), sent(layout.kv_indptr_R1), first.kv_indices, sent(layout.last_page_len_R)
            ),
            others=others,
        )
        return cls(
            input_ids_T=sent(plan.input_ids_T),
            rows_T=sent(np.repeat(rows_R, plan.num_new_R)),
            positions_T=sent(layout.positions_T),
            paged=paged,
            sampled_R=np.flatnonzero(plan.samples_R).tolist(),
            sampled_rows_S=sent(ends_R[plan.samples_R] - 1),
            sampled_page_rows_S=sent(rows_R[plan.samples_R]),
            prompt_rows=_prompt_rows(plan, ends_R),
        )


def state_step(pool: StatePool, plan: BatchPlan, batch: ForwardBatch) -> StateStep:
    """What layers with a recurrent state need of a plan's requests."""
    num_decoding = batch.paged.num_decoding
    firsts_R = batch.paged.q_indptr_R1[:-1]
    slots_R = batch.rows_T[batch.paged.pages.q_indptr_R1[:-1].long()]
    if num_decoding == len(firsts_R):
        return StateStep(pool.layers, slots_R, num_decoding)
    lens_P = plan.num_new_R[num_decoding:].tolist()
    pieces = [
        (first + start, min(PIECE_TOKENS, count - start), num_decoding + number)
        for number, (first, count) in enumerate(zip(firsts_R[num_decoding:].tolist(), lens_P, strict=True))
        for start in range(0, count, PIECE_TOKENS)
    ]
    return StateStep(
        pool.layers,
        slots_R,
        num_decoding,
        batch.paged.pages.q_indptr_R1[num_decoding:],
        lens_P,
        upload(np.array(pieces, dtype=np.int32), slots_R.device),
    )


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """The prefixes that requests of a step share.

    Attributes:
        order_R: the plan's requests in an order in which requests that share a prefix are neighbours.
        places_R: the place of each of the plan's requests in that order.
        runs: the neighbours that share, as places in that order.
    """

    order_R: NDArray[np.int64]
    places_R: NDArray[np.int64]
    runs: SharedRuns


def shared_prefixes(
    plan: BatchPlan,
    page_table: NDArray[np.int32],
    page_size: int,
    is_worth_it: Callable[[int, int, int], bool],
) -> SharedPrefixes | None:
    """The prefixes that requests of a decode step share; None: too little is shared.

    If two requests have the same page at the same place, it is a page of the prefix cache. A cached page has
    only one path to it, so all earlier pages are the same too.

    Args:
        page_table: int32 [rows, max_pages], `PageTable.array`.
        is_worth_it: (number of requests, pages that sharing saves reading, pages of all requests) → whether
            to.
    """
    # Only pages that are full before the new token can be shared: nothing is written to them any more.
    num_full_R = plan.starts_R // page_size
    # The longest request cannot share more pages than the second longest has.
    width = int(np.partition(num_full_R, -2)[-2]) if len(num_full_R) > 1 else 0
    if width == 0:
        return None
    table_RP = page_table[plan.page_rows_R, :width]
    # Sort rows of page ids as bytes: any order brings equal prefixes together.
    by_bytes = table_RP.view(f"V{table_RP.strides[0]}")[:, 0].tolist()
    order_R = np.array(sorted(range(len(num_full_R)), key=by_bytes.__getitem__))
    runs = runs_of_neighbours(table_RP[order_R], num_full_R[order_R])
    if not is_worth_it(len(order_R), runs.num_saved, int(num_full_R.sum())):
        return None
    return SharedPrefixes(order_R, order_R.argsort(), runs)


def resolve_tokens(input_ids_T: Tensor, rows_T: Tensor, next_tokens: Tensor) -> Tensor:
    """Replace `SAMPLED_BEFORE` by the token that was sampled last for the page row."""
    return torch.where(input_ids_T == SAMPLED_BEFORE, next_tokens[rows_T], input_ids_T)


def _indptr(counts_R: NDArray[np.int32]) -> NDArray[np.int32]:
    indptr_R1 = np.zeros(len(counts_R) + 1, dtype=np.int32)
    np.cumsum(counts_R, out=indptr_R1[1:])
    return indptr_R1


def _prompt_rows(plan: BatchPlan, ends_R: NDArray[np.int64]) -> list[PromptRows]:
    """Rows that predict a prompt position after `LogprobSpec.start`: the row at position p predicts p + 1."""
    rows = []
    # Skip requests with one new token that samples: it predicts no prompt token. Most requests are such.
    for request in np.flatnonzero((plan.num_new_R > 1) | ~plan.samples_R).tolist():
        spec = plan.specs[request]
        if spec.logprobs is None or spec.logprobs.start is None:
            continue
        start, num_new = int(plan.starts_R[request]), int(plan.num_new_R[request])
        first, end = max(spec.logprobs.start, start) + 1, min(start + num_new, len(spec.prompt_ids) - 1) + 1
        if first < end:
            first_row = int(ends_R[request]) - num_new + (first - 1 - start)
            rows.append(PromptRows(request, first_row, spec.prompt_ids[first:end]))
    return rows
