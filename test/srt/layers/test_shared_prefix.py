"""Decode attention that reads what requests share once: the work, item by item, against attention as a whole.

Shapes: B rows, C parts, N query heads, H head_dim, P pages, S page_size.
"""

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from ebbtide.srt.layers.attention.base import AttentionShape
from ebbtide.srt.layers.attention.flashinfer_items import ItemBuffers
from ebbtide.srt.layers.attention.shared_runs import NO_RUNS, SharedRuns

CPU = torch.device("cpu")
PAGE_SIZE, NUM_HEADS, HEAD_DIM, NUM_PAGES = 4, 8, 16, 4096
SHAPE = AttentionShape(NUM_HEADS, 2, HEAD_DIM, PAGE_SIZE, torch.float32, torch.float32, ())
# Rows and shared pages of each group.
GROUPS = {
    "samples": [(8, 5), (1, 0), (3, 2), (9, 40)],
    "nobody shares": [(1, 7)] * 6,
    "few long ones": [(2, 300), (1, 200)],
    "one prompt for all": [(40, 50)],
    "more pairs than are listed": [(2, pages) for pages in range(1, 30)],
}


class Step:
    """Rows with pages of their own behind those that their group shares."""

    def __init__(self, groups: list[tuple[int, int]]) -> None:
        rng = np.random.default_rng(0)
        ids = iter(rng.permutation(NUM_PAGES).astype(np.int32))
        self.tables: list[NDArray[np.int32]] = []
        self.lens: list[int] = []
        runs = []
        for num_rows, num_shared in groups:
            if num_rows > 1:
                runs.append((len(self.lens), num_rows, num_shared))
            shared = [next(ids) for _ in range(num_shared)]
            for _ in range(num_rows):
                own_len = int(rng.integers(1, 40))
                own = [next(ids) for _ in range(-(-own_len // PAGE_SIZE))]
                self.tables.append(np.array(shared + own, dtype=np.int32))
                self.lens.append(num_shared * PAGE_SIZE + own_len)
        columns = np.array(runs, dtype=np.int32).reshape(-1, 3)
        self.runs = SharedRuns(*columns.T) if runs else NO_RUNS
        counts = [0, *(len(table) for table in self.tables)]
        self.kv_indptr = np.cumsum(counts, dtype=np.int32)
        self.last_page_len = ((np.array(self.lens) - 1) % PAGE_SIZE + 1).astype(np.int32)
        generator = torch.Generator().manual_seed(0)
        size = (NUM_PAGES, PAGE_SIZE, HEAD_DIM)
        self.k_PSH, self.v_PSH = (torch.randn(size, generator=generator) for _ in range(2))
        self.q_BNH = torch.randn((len(self.lens), NUM_HEADS, HEAD_DIM), generator=generator)

    def expected(self) -> Tensor:
        rows = zip(self.q_BNH, self.tables, self.lens, strict=True)
        return torch.stack([self.attend(q_NH, table, length)[0] for q_NH, table, length in rows])

    def attend(self, q_NH: Tensor, pages: NDArray[np.int32], length: int) -> tuple[Tensor, Tensor]:
        """Attention, and the logarithm to base 2 of the sum of weights."""
        k_LH, v_LH = (side[pages].flatten(0, 1)[:length] for side in (self.k_PSH, self.v_PSH))
        scores_NL = q_NH @ k_LH.T
        return scores_NL.softmax(dim=-1) @ v_LH, scores_NL.logsumexp(dim=-1) / math.log(2)

    def by_list(self, items: ItemBuffers) -> Tensor:
        """Every block of the grid, as the kernel reads its list; then the parts of each row together."""
        words, info = items.words.numpy(), items.plan_info
        grid, requests_at, out_at = info[0], info[4] // 4, info[8] // 4
        q, kv, last = (part.numpy() for part in (items.q_indptr, items.kv_indptr, items.last_page_len))
        kv_indices = np.concatenate(self.tables)
        num_rows = len(self.lens)
        parts = torch.full((items.max_parts * num_rows, NUM_HEADS, HEAD_DIM), math.nan)
        sums = torch.full((items.max_parts * num_rows, NUM_HEADS), math.nan)
        for request in words[requests_at : requests_at + grid]:
            pages = kv_indices[kv[request] : kv[request + 1]]
            length = (len(pages) - 1) * PAGE_SIZE + int(last[request])
            for row in range(q[request], q[request + 1]):
                place = words[out_at + request] + row - q[request]
                assert sums[place].isnan().all(), "two items write to one place"
                parts[place], sums[place] = self.attend(self.q_BNH[row], pages, length)
        out = torch.empty_like(self.q_BNH)
        for row, count in enumerate(items.num_parts_B.tolist()):
            places = torch.arange(count) * num_rows + row
            weights = torch.exp2(sums[places] - torch.logsumexp(sums[places] * math.log(2), 0) / math.log(2))
            out[row] = (weights[:, :, None] * parts[places]).sum(dim=0)
        return out


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_attention_by_items_is_attention(groups: list[tuple[int, int]]) -> None:
    step = Step(groups)
    items = ItemBuffers(SHAPE, len(step.lens), CPU)

    items.plan(step.kv_indptr, step.last_page_len, NO_RUNS)
    torch.testing.assert_close(step.by_list(items), step.expected())
    # The next step's list takes the place of this one.
    items.plan(step.kv_indptr, step.last_page_len, step.runs)
    torch.testing.assert_close(step.by_list(items), step.expected())


def test_shared_pages_are_listed_once_per_tile_of_rows() -> None:
    step = Step([(8, 100)])
    items = ItemBuffers(SHAPE, 8, CPU)
    items.plan(step.kv_indptr, step.last_page_len, step.runs)

    num_read = np.diff(items.kv_indptr.numpy())[::2].sum()

    num_own = step.kv_indptr[-1] - 8 * 100
    tiles = 2  # of 16 rows: four requests with four heads for each KV head
    assert num_read == num_own + tiles * 100
