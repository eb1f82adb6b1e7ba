"""Attention of few requests: one kernel from projection to projection, beside rotation, FlashInfer and merge.

In a CUDA graph of 32 layers, each with a pool of its own, as a decode step has them. `24x1300+16384` are 23
requests of 1,300 tokens and one of 16,384. "now" marks what decode steps do.

    python bench/gpu_few_decode.py [--requests 1x640 32x640 24x1300+16384] [--heads 32x8] [--splits 1 2]
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from common import write_result
from gpu_small_batch import graph_us
from torch import Tensor

from ebbtide.srt.layers.attention.base import AttentionKind, AttentionShape
from ebbtide.srt.layers.attention.flashinfer_kernels import Workspace, decode_kernel, partial_bytes
from ebbtide.srt.layers.attention.paged_kernel import DevicePages, HostLens
from ebbtide.srt.layers.heads import Rope
from ebbtide.srt.layers.kernels.few_decode import Cut, attend_few, choose_cut
from ebbtide.srt.layers.kernels.paged_attention import Pages
from ebbtide.srt.layers.kernels.rope import rotate_and_store

DEVICE, BF16 = torch.device("cuda"), torch.bfloat16
NUM_LAYERS, PAGE_SIZE, HEAD_DIM = 32, 16, 128
KIND = AttentionKind(HEAD_DIM**-0.5)
REQUESTS = ("1x384", "1x640", "1x8192", "8x640", "32x400", "32x640")
HEADS = ("32x8", "32x4")
# What copies reach on an H200.
BYTES_PER_US = 4.24e6


class Case:
    """Requests of these lengths, on as many pools as there are layers."""

    def __init__(self, num_q: int, num_kv: int, lens: list[int]) -> None:
        num_requests = len(lens)
        lens_R = torch.tensor(lens, dtype=torch.int32)
        pages_R = (lens_R + PAGE_SIZE - 1) // PAGE_SIZE
        size = (int(pages_R.sum()), PAGE_SIZE, num_kv, HEAD_DIM)
        self.least_us = 2 * sum(lens) * num_kv * HEAD_DIM * BF16.itemsize / BYTES_PER_US
        self.pools = [torch.randn(2, *size, dtype=BF16, device=DEVICE) for _ in range(NUM_LAYERS)]
        self.qkv = torch.randn(num_requests, num_q + 2 * num_kv, HEAD_DIM, dtype=BF16, device=DEVICE)
        cos = torch.rand(num_requests, 1, HEAD_DIM, dtype=BF16, device=DEVICE)
        self.rope = Rope(cos, cos[..., : HEAD_DIM // 2].contiguous())
        order = torch.randperm(size[0], dtype=torch.int32)
        last_R = (lens_R - 1) % PAGE_SIZE
        kv_indptr = torch.cat([torch.zeros(1, dtype=torch.int32), pages_R.cumsum(0).int()])
        self.slots = (order[kv_indptr[1:].long() - 1].long() * PAGE_SIZE + last_R).to(DEVICE)
        q_indptr = torch.arange(num_requests + 1, dtype=torch.int32)
        self.lens = HostLens(q_indptr, kv_indptr, lens_R)
        self.pages = DevicePages(
            q_indptr.to(DEVICE), kv_indptr.to(DEVICE), order.to(DEVICE), (last_R + 1).to(DEVICE)
        )
        self.shape = AttentionShape(num_q, num_kv, HEAD_DIM, PAGE_SIZE, BF16, BF16, (KIND,))
        self.scratch = torch.zeros(partial_bytes(self.shape, DEVICE), dtype=torch.uint8, device=DEVICE)
        self.arrivals = torch.zeros(num_requests * num_kv, dtype=torch.int32, device=DEVICE)

    def by_three(self, whole: bool) -> Callable[[Tensor], Tensor]:
        kernel = decode_kernel(self.shape, KIND, Workspace(self.scratch))
        plan = kernel.plan(self.lens, captured=True, whole=whole)

        def layer(pool: Tensor) -> Tensor:
            q = rotate_and_store(self.qkv, self.rope, None, self.slots, pool[0], pool[1])
            out = torch.empty_like(q)
            kernel.run(plan, self.pages, q, pool[0], pool[1], out)
            return out

        return layer

    def at_once(self, cut: Cut) -> Callable[[Tensor], Tensor]:
        pages = Pages(
            self.pages.q_indptr_R1,
            self.pages.kv_indptr_R1,
            self.pages.kv_indices,
            self.pages.last_page_len_R,
            1,
        )

        def layer(pool: Tensor) -> Tensor:
            tensors = (self.qkv, self.rope, None, self.slots, pool[0], pool[1], pages, self.arrivals)
            return attend_few(*tensors, **KIND._asdict(), cut=cut)

        return layer


def named(cut: Cut) -> str:
    return f"at once {cut.splits}/{cut.least}/{cut.keys}"


def measure(case: Case, splits: Sequence[int]) -> list[dict[str, Any]]:
    now = choose_cut(len(case.lens.lens_R), case.shape.num_kv_heads, case.shape.group, DEVICE)
    cuts = {now} | {Cut(*sizes) for sizes in itertools.product(splits, (64, 128), (32, 64))}
    found: dict[str, Callable[[Tensor], Tensor]] = {
        "three kernels": case.by_three(False),
        "three kernels, whole": case.by_three(True),
    }
    found |= {named(cut): case.at_once(cut) for cut in cuts}
    expected = found["three kernels"](case.pools[0].clone())
    with ThreadPoolExecutor(14) as pool:
        outs = list(pool.map(lambda run: run(case.pools[0].clone()), list(found.values())))
    torch.cuda.synchronize()
    case.arrivals.zero_()
    rows = []
    for (what, run), _ in zip(found.items(), outs, strict=True):
        error = float((run(case.pools[0].clone()) - expected).abs().max())
        us = graph_us(lambda run=run: [run(pool) for pool in case.pools]) / NUM_LAYERS
        row = {"what": what, "us": round(us, 2), "greatest_difference": error}
        rows.append(row | {"now": what == named(now)})
    return rows


def lens_of(given: str) -> list[int]:
    """COUNTxTOKENS, the last of them of another length with +TOKENS."""
    even, _, long = given.partition("+")
    count, length = map(int, even.split("x"))
    return [length] * count if not long else [length] * (count - 1) + [int(long)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", nargs="+", default=list(REQUESTS), metavar="REQUESTSxTOKENS")
    parser.add_argument("--heads", nargs="+", default=list(HEADS), metavar="HEADSxKV_HEADS")
    parser.add_argument("--splits", nargs="+", type=int, default=[1, 2, 4, 8, 16])
    parser.add_argument("--shown", type=int, default=6)
    parser.add_argument("--label", default="", help="end of the result's name")
    args = parser.parse_args()
    name = "gpu_few_decode" + (f"_{args.label}" if args.label else "")
    table: list[dict[str, Any]] = []
    for heads in args.heads:
        for given in args.requests:
            case = Case(*map(int, heads.split("x")), lens_of(given))
            rows = measure(case, args.splits)
            print(f"{heads} heads, {given} tokens, bytes alone {case.least_us:.1f} us")
            by_time = sorted(rows, key=lambda row: row["us"])
            for row in [row for row in by_time if row in by_time[: args.shown] or row["now"]]:
                text = f"   {row['what']:28} {row['us']:8.2f} us   {row['greatest_difference']:.4f}"
                print(text + ("   now" if row["now"] else ""), flush=True)
            about = {"heads": heads, "requests": given, "bytes_us": round(case.least_us, 2)}
            table += [about | row for row in rows]
            write_result(name, {"layers": table})
            del case


if __name__ == "__main__":
    main()
