"""Decode attention where requests share their first pages: read by each of them, or once per group.

In a CUDA graph of 32 calls on pools that no cache holds. `plain` is the kernel as decode steps use it, with
rows of a group side by side; `plain_mixed` with rows in random order. `shared` reads shared pages once
per tile of rows; `items` goes through the same list of work without sharing. `plain_whole` cuts no request.
With `--grpo` the rows are those that still run after so many steps of 64 prompts with 8 samples each, with
the lengths of bench/gpu_rollout.py; "shares" is what the engine would do.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from common import write_result
from gpu_attention import DEVICE, HEAD_DIM, KIND, NUM_CALLS, PAGE_SIZE, replay_ms
from numpy.typing import NDArray
from rollout_calls import NUM_PROMPTS, NUM_SAMPLES, output_lens
from torch import Tensor

from ebbtide.srt.layers.attention.base import AttentionShape
from ebbtide.srt.layers.attention.flashinfer_items import ItemBuffers, ItemKernel, saves_time
from ebbtide.srt.layers.attention.flashinfer_kernels import (
    DevicePages,
    HostLens,
    PrefillKernel,
    Workspace,
    partial_bytes,
)
from ebbtide.srt.layers.attention.shared_runs import NO_RUNS, SharedRuns

Ints = NDArray[np.int64]
SHAPE = AttentionShape(32, 8, HEAD_DIM, PAGE_SIZE, torch.bfloat16, torch.bfloat16, (KIND,))
# Groups, rows of each, shared tokens, own tokens.
CASES = (
    (64, 8, 512, 250),
    (64, 8, 512, 1000),
    (64, 8, 4096, 250),
    (64, 8, 4096, 1000),
    (64, 2, 4096, 250),
    (32, 2, 4096, 800),
    (8, 8, 4096, 250),
    (4, 4, 4096, 800),
    (1, 256, 1024, 300),
    (64, 1, 4096, 800),
    (16, 1, 4096, 800),
)


class Case:
    """Groups of so many rows each, which share `shared` tokens and have `own_lens` of their own."""

    def __init__(self, rows_G: Ints, shared: int, own_lens: Ints) -> None:
        rng = np.random.default_rng(0)
        self.num_rows, groups = int(rows_G.sum()), len(rows_G)
        self.lens = (shared + own_lens).astype(np.int32)
        shared_pages = shared // PAGE_SIZE
        num_pages = -(-self.lens // PAGE_SIZE)
        total = int(groups * shared_pages + (num_pages - shared_pages).sum())
        self.total = total
        ids = rng.permutation(total).astype(np.int32)
        heads = ids[: groups * shared_pages].reshape(groups, shared_pages)
        rest = np.split(ids[groups * shared_pages :], np.cumsum(num_pages - shared_pages)[:-1])
        group_R = np.repeat(np.arange(groups), rows_G)
        self.tables = [np.concatenate([heads[group_R[row]], rest[row]]) for row in range(self.num_rows)]
        pool_bytes = 4 * total * PAGE_SIZE * 8 * HEAD_DIM
        size = (total, PAGE_SIZE, 8, HEAD_DIM)
        count = 2 if pool_bytes > 1 << 30 else 4
        self.pools = [
            tuple(torch.randn(size, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
            for _ in range(count)
        ]
        self.q = torch.randn(self.num_rows, 32, HEAD_DIM, dtype=torch.bfloat16, device=DEVICE)
        several_G = rows_G > 1
        self.runs = SharedRuns(
            (np.cumsum(rows_G) - rows_G)[several_G].astype(np.int32),
            rows_G[several_G].astype(np.int32),
            np.full(several_G.sum(), shared_pages, dtype=np.int32),
        )
        self.read_bytes = pool_bytes

    def arrays(self, order: np.ndarray) -> tuple[np.ndarray, np.ndarray, Tensor]:
        """indptr, last page lengths, and page ids on the device, of rows in this order."""
        tables = [self.tables[row] for row in order]
        indptr = np.concatenate([[0], np.cumsum([len(table) for table in tables])]).astype(np.int32)
        last = ((self.lens[order] - 1) % PAGE_SIZE + 1).astype(np.int32)
        return indptr, last, torch.from_numpy(np.concatenate(tables)).to(DEVICE)


def graph_us(call: Any, case: Case) -> float:
    with torch.cuda.stream(torch.cuda.Stream()):
        call(case.pools[0])
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        for number in range(NUM_CALLS):
            call(case.pools[number % len(case.pools)])
        graph.capture_end()
        return replay_ms(graph.replay) / NUM_CALLS * 1e3


def even(groups: int, rows: int, shared: int, own: int) -> Case:
    own_lens = np.random.default_rng(0).integers(own // 2, own * 3 // 2, groups * rows)
    return Case(np.full(groups, rows), shared, own_lens)


def grpo(prompt_len: int, num_steps: int) -> Case:
    """What runs still, `num_steps` after all samples began together; a prompt's last token is not shared."""
    runs_R = output_lens(NUM_PROMPTS * NUM_SAMPLES) > num_steps
    rows_G = np.bincount(np.repeat(np.arange(NUM_PROMPTS), NUM_SAMPLES)[runs_R])
    shared = (prompt_len - 1) // PAGE_SIZE * PAGE_SIZE
    own_lens = np.full(runs_R.sum(), prompt_len - shared + num_steps)
    return Case(rows_G[rows_G > 0], shared, own_lens)


def plain(case: Case, order: np.ndarray, partial: Tensor, *, whole: bool = False) -> tuple[float, Tensor]:
    indptr, last, indices = case.arrays(order)
    kernel = PrefillKernel(SHAPE, KIND, Workspace(partial), causal=False, backend="fa2")
    q_indptr = torch.arange(case.num_rows + 1, dtype=torch.int32)
    lens = torch.from_numpy(case.lens[order])
    plan = kernel.plan(HostLens(q_indptr, torch.from_numpy(indptr), lens), captured=True, whole=whole)
    pages = DevicePages(
        q_indptr.to(DEVICE),
        torch.from_numpy(indptr).to(DEVICE),
        indices,
        torch.from_numpy(last).to(DEVICE),
    )
    q = case.q[torch.from_numpy(order).to(DEVICE)]
    out = torch.empty_like(q)
    us = graph_us(lambda pool: kernel.run(plan, pages, q, *pool, out), case)
    kernel.run(plan, pages, q, *case.pools[0], out)
    return us, out


def by_items(case: Case, runs: SharedRuns) -> tuple[float, Tensor]:
    indptr, last, indices = case.arrays(np.arange(case.num_rows))
    items = ItemBuffers(SHAPE, case.num_rows, DEVICE)
    items.plan(indptr, last, runs)
    kernel = ItemKernel(SHAPE, KIND, DEVICE)
    # The list takes the place of the requests' bounds.
    pages = DevicePages(indices, indices, indices, indices)
    out = torch.empty_like(case.q)
    us = graph_us(lambda pool: kernel.run(items, pages, case.q, *pool, out), case)
    kernel.run(items, pages, case.q, *case.pools[0], out)
    return us, out


def measure(case: Case, partial: Tensor) -> dict[str, Any]:
    order = np.arange(case.num_rows)
    row: dict[str, Any] = {"limit": case.read_bytes / 4.2e6}
    row["plain"], expected = plain(case, order, partial)
    row["plain_whole"], _ = plain(case, order, partial, whole=True)
    row["mixed"], _ = plain(case, np.random.default_rng(1).permutation(case.num_rows), partial)
    for name, runs in (("shared", case.runs), ("items", NO_RUNS)):
        row[name], out = by_items(case, runs)
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
    return {key: round(value, 1) for key, value in row.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--grpo", nargs="+", default=[], metavar="PROMPTxSTEPS")
    parser.add_argument("--label", default="", help="end of the result's name")
    args = parser.parse_args()
    cases: dict[str, tuple[Callable[..., Case], tuple[int, ...]]] = {}
    if args.grpo:
        cases = {given: (grpo, tuple(map(int, given.split("x")))) for given in args.grpo}
    else:
        cases = {
            f"{groups}x{count}, {shared}+{own}": (even, (groups, count, shared, own))
            for groups, count, shared, own in CASES
        }
    rows: list[dict[str, Any]] = []
    partial = torch.zeros(partial_bytes(SHAPE, DEVICE), dtype=torch.uint8, device=DEVICE)
    for name, (make, sizes) in cases.items():
        case = make(*sizes)
        num_pages = int(((case.lens - 1) // PAGE_SIZE).sum())
        shares = saves_time(SHAPE, case.num_rows, case.runs.num_saved, num_pages)
        about = {"case": name, "rows": case.num_rows, "saved_pages": case.runs.num_saved, "shares": shares}
        row = about | measure(case, partial)
        print(row, flush=True)
        rows.append(row)
        del case
    print(write_result("gpu_shared_prefix" + (f"_{args.label}" if args.label else ""), {"batches": rows}))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
