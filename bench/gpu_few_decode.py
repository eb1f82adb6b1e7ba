"""Attention of few requests: one kernel from projection to projection, beside rotation, FlashInfer and merge.

In a CUDA graph of 32 layers, each with a pool of its own, as a decode step has them.

    python bench/gpu_few_decode.py [--requests 1x640 32x640]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
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
from ebbtide.srt.layers.kernels.few_decode import Cut, attend_few
from ebbtide.srt.layers.kernels.paged_attention import Pages
from ebbtide.srt.layers.kernels.rope import rotate_and_store

DEVICE, BF16 = torch.device("cuda"), torch.bfloat16
NUM_LAYERS, PAGE_SIZE, HEAD_DIM = 32, 16, 128
KIND = AttentionKind(HEAD_DIM**-0.5)
REQUESTS = ("1x384", "1x640", "1x8192", "8x640", "32x400", "32x640")
HEADS = ((32, 8), (32, 4))


class Case:
    """Requests of one length, on as many pools as there are layers."""

    def __init__(self, num_q: int, num_kv: int, num_requests: int, length: int) -> None:
        self.count, self.length, self.num_kv = num_requests, length, num_kv
        pages_each = -(-length // PAGE_SIZE)
        size = (num_requests * pages_each, PAGE_SIZE, num_kv, HEAD_DIM)
        self.pools = [torch.randn(2, *size, dtype=BF16, device=DEVICE) for _ in range(NUM_LAYERS)]
        self.qkv = torch.randn(num_requests, num_q + 2 * num_kv, HEAD_DIM, dtype=BF16, device=DEVICE)
        cos = torch.rand(num_requests, 1, HEAD_DIM, dtype=BF16, device=DEVICE)
        self.rope = Rope(cos, cos[..., : HEAD_DIM // 2].contiguous())
        order = torch.randperm(size[0], dtype=torch.int32)
        last = (length - 1) % PAGE_SIZE
        self.slots = (order.view(num_requests, -1)[:, -1].long() * PAGE_SIZE + last).to(DEVICE)
        q_indptr = torch.arange(num_requests + 1, dtype=torch.int32)
        self.lens = HostLens(
            q_indptr, q_indptr * pages_each, torch.full((num_requests,), length, dtype=torch.int32)
        )
        lasts = torch.full((num_requests,), last + 1, dtype=torch.int32, device=DEVICE)
        self.pages = DevicePages(
            q_indptr.to(DEVICE), (q_indptr * pages_each).to(DEVICE), order.to(DEVICE), lasts
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

    def cuts(self) -> list[Cut]:
        return [Cut(splits, least) for splits in (1, 2, 4, 8, 16) for least in (64, 128)]


def measure(case: Case) -> list[dict[str, Any]]:
    found: dict[str, Callable[[Tensor], Tensor]] = {
        "three kernels": case.by_three(False),
        "three kernels, whole": case.by_three(True),
    }
    found |= {"at once " + "/".join(map(str, vars(cut).values())): case.at_once(cut) for cut in case.cuts()}
    expected = found["three kernels"](case.pools[0].clone())
    with ThreadPoolExecutor(14) as pool:
        outs = list(pool.map(lambda run: run(case.pools[0].clone()), list(found.values())))
    torch.cuda.synchronize()
    case.arrivals.zero_()
    rows = []
    for (what, run), _ in zip(found.items(), outs, strict=True):
        error = float((run(case.pools[0].clone()) - expected).abs().max())
        us = graph_us(lambda run=run: [run(pool) for pool in case.pools]) / NUM_LAYERS
        rows.append({"what": what, "us": round(us, 2), "greatest_difference": error})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", nargs="+", default=list(REQUESTS), metavar="REQUESTSxTOKENS")
    args = parser.parse_args()
    table: list[dict[str, Any]] = []
    for heads in HEADS:
        for given in args.requests:
            count, length = map(int, given.split("x"))
            case = Case(*heads, count, length)
            rows = measure(case)
            print(f"{heads[0]} heads, {heads[1]} of keys, {count} x {length} tokens")
            for row in rows[:2] + sorted(rows[2:], key=lambda row: row["us"]):
                print(
                    f"   {row['what']:28} {row['us']:8.2f} us   {row['greatest_difference']:.4f}", flush=True
                )
            table += [{"heads": heads, "requests": count, "tokens": length} | row for row in rows]
            write_result("gpu_few_decode", {"layers": table})
            del case


if __name__ == "__main__":
    main()
