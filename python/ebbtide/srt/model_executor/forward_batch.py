"""A batch plan turned into the tensors of one forward pass.

Shapes: T tokens, R requests, P pages, S sampled requests, M prompt positions with logprobs.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ebbtide.srt.model_executor.batch_plan import BatchPlan, SampleSpec


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
class ForwardBatch:
    """The tensors of one forward pass.

    Attributes:
        input_ids_T, positions_T: int64.
        num_new_R, lens_R: new tokens, and all tokens with them, of each request.
        page_table_RP: int32 page ids, as wide as the longest request needs.
        slots_T: int64, place of each new token in the pool: page · page_size + offset.
        sampled_R: requests that sample, ascending; the S of `sampled_rows_S`.
        sampled_rows_S: int64, the rows whose logits are sampled.
        prompt_rows: where prompt logprobs come from; empty as a rule.
    """

    input_ids_T: Tensor
    positions_T: Tensor
    num_new_R: NDArray[np.int32]
    lens_R: NDArray[np.int32]
    page_table_RP: NDArray[np.int32]
    slots_T: Tensor
    sampled_R: list[int]
    sampled_rows_S: Tensor
    prompt_rows: list[PromptRows]

    @classmethod
    def from_plan(cls, plan: BatchPlan, page_table: NDArray[np.int32], page_size: int) -> Self:
        """Lay out a plan; `page_table` [rows, max_pages] is indexed by the plan's `page_rows_R`."""
        num_new_R, starts_R = plan.num_new_R, plan.starts_R
        ends_R = np.cumsum(num_new_R, dtype=np.int64)
        lens_R = starts_R + num_new_R
        width = -(-int(lens_R.max()) // page_size)
        page_table_RP = page_table[plan.page_rows_R, :width]
        # Row t of request r stands at position t + (starts_r − first row of r).
        positions_T = np.arange(len(plan.input_ids_T)) + np.repeat(starts_R - (ends_R - num_new_R), num_new_R)
        requests_T = np.repeat(np.arange(len(num_new_R)), num_new_R)
        pages_T = page_table_RP[requests_T, positions_T // page_size].astype(np.int64)
        return cls(
            input_ids_T=torch.from_numpy(plan.input_ids_T),
            positions_T=torch.from_numpy(positions_T),
            num_new_R=num_new_R,
            lens_R=lens_R,
            page_table_RP=page_table_RP,
            slots_T=torch.from_numpy(pages_T * page_size + positions_T % page_size),
            sampled_R=np.flatnonzero(plan.samples_R).tolist(),
            sampled_rows_S=torch.from_numpy(ends_R[plan.samples_R] - 1),
            prompt_rows=_prompt_rows(plan, ends_R),
        )


def _prompt_rows(plan: BatchPlan, ends_R: NDArray[np.int64]) -> list[PromptRows]:
    """Rows that predict a prompt position after `LogprobSpec.start`: the row at position p predicts p + 1."""
    rows = []
    for request, spec in enumerate(plan.specs):
        if (wanted_from := _first_wanted(spec)) is None:
            continue
        start, num_new = int(plan.starts_R[request]), int(plan.num_new_R[request])
        first, end = max(wanted_from, start) + 1, min(start + num_new, len(spec.prompt_ids) - 1) + 1
        if first < end:
            first_row = int(ends_R[request]) - num_new + (first - 1 - start)
            rows.append(PromptRows(request, first_row, spec.prompt_ids[first:end]))
    return rows


def _first_wanted(spec: SampleSpec) -> int | None:
    return spec.logprobs.start if spec.logprobs is not None else None
