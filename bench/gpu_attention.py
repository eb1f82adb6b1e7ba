"""FlashInfer's kernels for one new token per request: which suits which batch.

In a CUDA graph of 32 calls on pools that no cache holds: on CUDA cores, on tensor cores with long requests
split among blocks, and on tensor cores with one block per request and KV head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from common import write_result

from ebbtide.srt.layers.attention.base import AttentionKind, AttentionShape
from ebbtide.srt.layers.attention.flashinfer_kernels import (
    DecodeKernel,
    PrefillKernel,
    Workspace,
    partial_bytes,
)
from ebbtide.srt.layers.attention.paged_kernel import DevicePages, HostLens, PagedKernel

DEVICE = torch.device("cuda")
PAGE_SIZE, HEAD_DIM, NUM_CALLS, NUM_REPLAYS = 16, 128, 32, 8
KIND = AttentionKind(HEAD_DIM**-0.5)
HEADS = ((32, 8), (16, 8), (28, 4))
BATCHES = ((1, 256), (8, 400), (16, 400), (32, 256), (32, 400), (32, 2000), (64, 640), (96, 640), (256, 640))
CACHE_BYTES = 200_000_000


def call_us(kernel: PagedKernel, shape: AttentionShape, num_requests: int, length: int) -> float:
    """Microseconds of one call."""
    num_pages = -(-length // PAGE_SIZE)
    total = num_requests * num_pages
    size = (total, PAGE_SIZE, shape.num_kv_heads, HEAD_DIM)
    pool_bytes = 2 * 2 * total * PAGE_SIZE * shape.num_kv_heads * HEAD_DIM
    pools = [
        tuple(torch.randn(size, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
        for _ in range(max(1, min(16, CACHE_BYTES // pool_bytes + 1)))
    ]
    q = torch.randn(num_requests, shape.num_q_heads, HEAD_DIM, dtype=torch.bfloat16, device=DEVICE)
    out = torch.empty_like(q)
    q_indptr = torch.arange(num_requests + 1, dtype=torch.int32)
    kv_indptr = q_indptr * num_pages
    last = torch.full((num_requests,), (length - 1) % PAGE_SIZE + 1, dtype=torch.int32, device=DEVICE)
    indices = torch.randperm(total, device=DEVICE).int()
    pages = DevicePages(q_indptr.to(DEVICE), kv_indptr.to(DEVICE), indices, last)
    lens = torch.full((num_requests,), length, dtype=torch.int32)
    plan = kernel.plan(HostLens(q_indptr, kv_indptr, lens), captured=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        kernel.run(plan, pages, q, *pools[0], out)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        for call in range(NUM_CALLS):
            kernel.run(plan, pages, q, *pools[call % len(pools)], out)
        graph.capture_end()
        return replay_ms(graph.replay) / NUM_CALLS * 1e3


def replay_ms(replay: Callable[[], None]) -> float:
    for _ in range(3):
        replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(NUM_REPLAYS):
        replay()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / NUM_REPLAYS


def kernels(shape: AttentionShape) -> dict[str, PagedKernel]:
    partial = torch.zeros(partial_bytes(shape, DEVICE), dtype=torch.uint8, device=DEVICE)
    split, whole = (
        PrefillKernel(shape, KIND, Workspace(partial), causal=False, backend="fa2") for _ in range(2)
    )
    split._unsplit_from, whole._unsplit_from = 1 << 30, 1
    found: dict[str, PagedKernel] = {"split": split, "whole": whole}
    if shape.group <= 4:
        found["cuda_cores"] = DecodeKernel(shape, KIND, Workspace(partial))
    return found


def main() -> None:
    rows: list[dict[str, Any]] = []
    for num_q, num_kv in HEADS:
        dtype = torch.bfloat16
        shape = AttentionShape(num_q, num_kv, HEAD_DIM, PAGE_SIZE, dtype, dtype, (KIND,))
        for num_requests, length in BATCHES:
            row: dict[str, Any] = {"heads": [num_q, num_kv], "requests": num_requests, "tokens": length}
            for name, kernel in kernels(shape).items():
                row[f"{name}_us"] = round(call_us(kernel, shape, num_requests, length), 1)
            print(row, flush=True)
            rows.append(row)
    print(write_result("gpu_attention", {"batches": rows}))


if __name__ == "__main__":
    main()
