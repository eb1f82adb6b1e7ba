"""Attention to keys and values of one byte each, beside those of two: which kernel suits which batch.

In a CUDA graph of 32 calls on pools that no cache holds. Every kernel's output for FP8 is compared with the
bf16 kernel's on the same numbers, read back from FP8.
"""

from __future__ import annotations

import argparse
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
from common import write_result
from gpu_attention import DEVICE, HEAD_DIM, KIND, NUM_CALLS, PAGE_SIZE, replay_ms
from torch import Tensor

from ebbtide.srt.layers.attention.base import AttentionShape
from ebbtide.srt.layers.attention.flashinfer_compile import compile_kernels
from ebbtide.srt.layers.attention.flashinfer_items import ItemBuffers, ItemKernel
from ebbtide.srt.layers.attention.flashinfer_kernels import (
    DecodeKernel,
    PrefillKernel,
    Workspace,
    partial_bytes,
    prefill_kernel,
)
from ebbtide.srt.layers.attention.paged_kernel import DevicePages, HostLens, PagedKernel
from ebbtide.srt.layers.attention.shared_runs import NO_RUNS
from ebbtide.srt.layers.kernels.fp8.decode import attend_fp8
from ebbtide.srt.layers.kernels.fp8.pages import widen_pages
from ebbtide.srt.layers.kernels.paged_attention import Pages, attend

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
HEADS = ((32, 8), (16, 8))
DECODES = ((32, 400), (256, 768), (64, 8192))
PREFILLS = ((16, 1024), (2, 8192))
NUM_POOLS = 2


class Case:
    """Requests of one length, on pools in FP8 and the same numbers in bf16."""

    def __init__(self, heads: tuple[int, int], num_requests: int, length: int, num_new: int) -> None:
        self.num_q, self.num_kv = heads
        self.num_requests, self.length, self.num_new = num_requests, length, num_new
        self.num_pages = -(-length // PAGE_SIZE)
        size = (num_requests * self.num_pages, PAGE_SIZE, self.num_kv, HEAD_DIM)
        self.fp8 = [
            tuple(torch.randn(size, dtype=BF16, device=DEVICE).to(FP8) for _ in range(2))
            for _ in range(NUM_POOLS)
        ]
        self.bf16 = [tuple(side.to(BF16) for side in pool) for pool in self.fp8]
        self.q = torch.randn(num_requests * num_new, self.num_q, HEAD_DIM, dtype=BF16, device=DEVICE)
        self.q_indptr = torch.arange(num_requests + 1, dtype=torch.int32) * num_new
        self.kv_indptr = torch.arange(num_requests + 1, dtype=torch.int32) * self.num_pages
        self.indices = torch.randperm(size[0], device=DEVICE).int()
        last = (length - 1) % PAGE_SIZE + 1
        self.last = torch.full((num_requests,), last, dtype=torch.int32, device=DEVICE)
        self.lens = HostLens(
            self.q_indptr, self.kv_indptr, torch.full((num_requests,), length, dtype=torch.int32)
        )
        self.pages = DevicePages(self.q_indptr.to(DEVICE), self.kv_indptr.to(DEVICE), self.indices, self.last)

    def shape(self, kv_dtype: torch.dtype) -> AttentionShape:
        return AttentionShape(self.num_q, self.num_kv, HEAD_DIM, PAGE_SIZE, BF16, kv_dtype, (KIND,))

    def pools(self, kv_dtype: torch.dtype) -> list[tuple[Tensor, ...]]:
        return self.fp8 if kv_dtype == FP8 else self.bf16


Call = Callable[[Tensor, Tensor, Tensor], None]


def planned(case: Case, kernel: PagedKernel, *, captured: bool) -> Call:
    plan = kernel.plan(case.lens, captured=captured)
    return lambda k, v, out: kernel.run(plan, case.pages, case.q, k, v, out)


def by_items(case: Case, kv_dtype: torch.dtype) -> Call:
    shape = case.shape(kv_dtype)
    items, kernel = ItemBuffers(shape, case.num_requests, DEVICE), ItemKernel(shape, KIND, DEVICE)
    items.plan(case.kv_indptr.numpy(), case.last.cpu().numpy(), NO_RUNS)
    return lambda k, v, out: kernel.run(items, case.pages, case.q, k, v, out)


def by_triton(case: Case) -> Call:
    pages = Pages(
        case.pages.q_indptr_R1, case.pages.kv_indptr_R1, case.indices, case.last, most_new=case.num_new
    )
    return lambda k, v, out: attend(case.q, k, v, pages, out, **KIND._asdict())


def by_words(case: Case) -> Call:
    pages = Pages(case.pages.q_indptr_R1, case.pages.kv_indptr_R1, case.indices, case.last, most_new=1)
    return lambda k, v, out: attend_fp8(case.q, k, v, pages, out, **KIND._asdict())


def by_half(case: Case) -> Call:
    """FlashInfer's kernel for tiles with queries of float16."""
    shape = replace(case.shape(FP8), dtype=torch.float16)
    scratch = torch.zeros(partial_bytes(shape, DEVICE), dtype=torch.uint8, device=DEVICE)
    kernel = PrefillKernel(shape, KIND, Workspace(scratch), causal=False, backend="fa2")
    kernel._unsplit_from = 1
    plan = kernel.plan(case.lens, captured=True)
    q, half = case.q.half(), torch.empty_like(case.q, dtype=torch.float16)

    def call(k: Tensor, v: Tensor, out: Tensor) -> None:
        kernel.run(plan, case.pages, q, k, v, half)
        out.copy_(half)

    return call


def widened(case: Case) -> Call:
    """The kernel for prompts on pages that were read back into bf16."""
    shape = case.shape(BF16)
    scratch = torch.zeros(partial_bytes(shape, DEVICE), dtype=torch.uint8, device=DEVICE)
    kernel = prefill_kernel(shape, KIND, Workspace(scratch))
    plan = kernel.plan(case.lens, captured=False)
    room = [torch.empty_like(side) for side in case.bf16[0]]
    indices = torch.arange(len(case.indices), dtype=torch.int32, device=DEVICE)
    pages = DevicePages(case.pages.q_indptr_R1, case.pages.kv_indptr_R1, indices, case.last)

    def call(k: Tensor, v: Tensor, out: Tensor) -> None:
        widen_pages(k, v, case.indices, *room)
        kernel.run(plan, pages, case.q, *room, out)

    return call


def by_xqa(case: Case, *, rounds_queries: bool) -> Call:
    """FlashInfer's kernel for Hopper, which rounds queries and weights to FP8 too; or that for all cards."""
    library = import_module("flashinfer.xqa")
    vars(library)["get_compute_capability"] = lambda device: (9 if rounds_queries else 10, 0)
    xqa = vars(library)["xqa"]
    table = case.indices.view(case.num_requests, case.num_pages)
    lens = torch.full((case.num_requests, 1), case.length, dtype=torch.uint32, device=DEVICE)
    room = torch.zeros(256 << 20, dtype=torch.uint8, device=DEVICE)
    semaphores = torch.zeros(8 << 20, dtype=torch.uint8, device=DEVICE).view(torch.uint32)

    def call(k: Tensor, v: Tensor, out: Tensor) -> None:
        xqa(
            case.q.unsqueeze(1),
            k,
            v,
            table,
            lens,
            out.unsqueeze(1),
            room,
            semaphores,
            case.num_kv,
            PAGE_SIZE,
        )

    return call


def decode_calls(case: Case, kv_dtype: torch.dtype) -> dict[str, Callable[[], Call]]:
    shape = case.shape(kv_dtype)
    scratch = torch.zeros(partial_bytes(shape, DEVICE), dtype=torch.uint8, device=DEVICE)

    def tiles(unsplit_from: int) -> Call:
        kernel = PrefillKernel(shape, KIND, Workspace(scratch), causal=False, backend="fa2")
        kernel._unsplit_from = unsplit_from
        return planned(case, kernel, captured=True)

    return {
        "split": lambda: tiles(1 << 30),
        "whole": lambda: tiles(1),
        "items": lambda: by_items(case, kv_dtype),
        "triton": lambda: by_triton(case),
        "cuda_cores": lambda: planned(case, DecodeKernel(shape, KIND, Workspace(scratch)), captured=True),
    }


def new_calls(case: Case, kv_dtype: torch.dtype) -> dict[str, Callable[[], Call]]:
    if kv_dtype != FP8:
        return {"whole": decode_calls(case, kv_dtype)["whole"]}
    return {"half": partial(by_half, case), "words": partial(by_words, case)}


def xqa_calls(case: Case, kv_dtype: torch.dtype) -> dict[str, Callable[[], Call]]:
    if kv_dtype != FP8:
        return {"whole": decode_calls(case, kv_dtype)["whole"]}
    return {
        "xqa_fp8": partial(by_xqa, case, rounds_queries=True),
        "xqa_bf16": partial(by_xqa, case, rounds_queries=False),
    }


def prefill_calls(case: Case, kv_dtype: torch.dtype) -> dict[str, Callable[[], Call]]:
    shape = case.shape(kv_dtype)
    scratch = torch.zeros(partial_bytes(shape, DEVICE), dtype=torch.uint8, device=DEVICE)
    kernel = prefill_kernel(shape, KIND, Workspace(scratch))
    calls: dict[str, Callable[[], Call]] = {"prefill": lambda: planned(case, kernel, captured=False)}
    if kv_dtype == FP8:
        calls["widened"] = partial(widened, case)
    return calls


def graph_us(call: Call, pools: list[tuple[Tensor, ...]], out: Tensor, num_calls: int) -> float:
    with torch.cuda.stream(torch.cuda.Stream()):
        call(*pools[0], out)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        for number in range(num_calls):
            call(*pools[number % len(pools)], out)
        graph.capture_end()
        return replay_ms(graph.replay) / num_calls * 1e3


CALLS = {"decode": decode_calls, "new": new_calls, "prefill": prefill_calls, "xqa": xqa_calls}


def measure(case: Case, what: str) -> dict[str, Any]:
    row: dict[str, Any] = {
        "what": what,
        "heads": [case.num_q, case.num_kv],
        "requests": case.num_requests,
        "tokens": case.length,
    }
    expected: Tensor | None = None
    for dtype, prefix in ((BF16, "bf16"), (FP8, "fp8")):
        for name, make in CALLS[what](case, dtype).items():
            out = torch.empty_like(case.q)
            try:
                call = make()
                num_calls = 4 if what == "prefill" else NUM_CALLS
                row[f"{prefix}_{name}_us"] = round(graph_us(call, case.pools(dtype), out, num_calls), 1)
                call(*case.pools(dtype)[0], out)
                if expected is None:
                    expected = out.clone()
                row[f"{prefix}_{name}_off"] = round(float((out - expected).abs().max()), 4)
            except Exception as error:
                traceback.print_exc(limit=2)
                row[f"{prefix}_{name}_us"] = f"{type(error).__name__}: {str(error)[:200]}"
    kv_bytes = 2 * case.num_requests * case.length * case.num_kv * HEAD_DIM
    row["bytes_fp8"] = kv_bytes
    return row


def compile_all() -> dict[str, float]:
    """Seconds that each model's kernels for FP8 take to compile, where they are not in the cache."""
    seconds = {}
    for heads in HEADS:
        shape = AttentionShape(*heads, HEAD_DIM, PAGE_SIZE, BF16, FP8, (KIND,))
        started = time.monotonic()
        compile_kernels(shape, DEVICE, lambda *step: print(*step, flush=True))
        seconds[f"{heads[0]}/{heads[1]}"] = round(time.monotonic() - started, 1)
        print("compiled", heads, seconds, flush=True)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=CALLS, default=list(CALLS))
    parser.add_argument("--query-heads", type=int, nargs="+", default=[heads[0] for heads in HEADS])
    args = parser.parse_args()
    seconds = compile_all()
    rows = []
    for heads in (heads for heads in HEADS if heads[0] in args.query_heads):
        for what in args.only:
            for num_requests, length in PREFILLS if what == "prefill" else DECODES:
                num_new = length if what == "prefill" else 1
                rows.append(measure(Case(heads, num_requests, length, num_new), what))
                print(rows[-1], flush=True)
        write_result("gpu_fp8_kv", {"compile_s": seconds, "batches": rows})


if __name__ == "__main__":
    main()
