"""Whether halves of a large decode step, on two streams, are quicker than the step as a whole.

Products of many rows wait for tensor cores and attention for memory: where one half of the requests attends
while the other one multiplies, both are busy. Layers of Llama-3.1-8B's shape, in a CUDA graph: all requests
on one stream; halves in turns on two streams; and products and attention at once that have nothing to do with
each other, which is the best that there could be.

    python bench/gpu_two_streams.py --requests 256 512 1024
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable
from typing import Any

import torch
from common import write_result
from torch import Tensor

from ebbtide.srt.layers.attention.base import AttentionKind, AttentionShape
from ebbtide.srt.layers.attention.flashinfer_kernels import PrefillKernel, Workspace, partial_bytes
from ebbtide.srt.layers.attention.paged_kernel import DevicePages, HostLens

DEVICE = torch.device("cuda")
PAGE_SIZE, HEAD_DIM, NUM_Q, NUM_KV = 16, 128, 32, 8
HIDDEN, INNER = 4096, 14_336
KIND = AttentionKind(HEAD_DIM**-0.5)
NUM_LAYERS, NUM_REPLAYS = 4, 7


class Half:
    """Some requests: their attention and their products, of one layer after the other."""

    def __init__(self, num_requests: int, context_len: int, pools: list[tuple[Tensor, Tensor]]) -> None:
        dtype = torch.bfloat16
        shape = AttentionShape(NUM_Q, NUM_KV, HEAD_DIM, PAGE_SIZE, dtype, dtype, (KIND,))
        num_pages = -(-context_len // PAGE_SIZE)
        q_indptr = torch.arange(num_requests + 1, dtype=torch.int32)
        kv_indptr = q_indptr * num_pages
        indices = torch.randperm(num_requests * num_pages, device=DEVICE).int()
        last = torch.full((num_requests,), PAGE_SIZE, dtype=torch.int32, device=DEVICE)
        self._pages = DevicePages(q_indptr.to(DEVICE), kv_indptr.to(DEVICE), indices, last)
        partial = torch.zeros(partial_bytes(shape, DEVICE), dtype=torch.uint8, device=DEVICE)
        self._kernel = PrefillKernel(shape, KIND, Workspace(partial), causal=False, backend="fa2")
        lens = torch.full((num_requests,), num_pages * PAGE_SIZE, dtype=torch.int32)
        self._plan = self._kernel.plan(HostLens(q_indptr, kv_indptr, lens), captured=True, whole=True)
        self._pools = pools
        self._q = torch.randn(num_requests, NUM_Q, HEAD_DIM, dtype=dtype, device=DEVICE)
        self._attended = torch.empty_like(self._q)
        self._hidden = torch.randn(num_requests, HIDDEN, dtype=dtype, device=DEVICE)

    def attend(self, layer: int) -> None:
        self._kernel.run(self._plan, self._pages, self._q, *self._pools[layer], self._attended)

    def multiply(self, weights: list[Tensor]) -> None:
        o, gate_up, down, qkv = weights
        self._hidden.addmm_(self._attended.flatten(1), o.t())
        both = self._hidden @ gate_up.t()
        self._hidden.addmm_(both[:, :INNER], down.t())
        _ = self._hidden @ qkv.t()


def graph_us(body: Callable[[], None]) -> float:
    """Microseconds of a layer."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        body()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            body()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(NUM_REPLAYS + 1)]
        for _ in range(3):
            graph.replay()
        events[0].record()
        for event in events[1:]:
            graph.replay()
            event.record()
        torch.cuda.synchronize()
    times = [before.elapsed_time(after) for before, after in itertools.pairwise(events)]
    return statistics.median(times) * 1e3 / NUM_LAYERS


def in_turns(halves: list[Half], weights: list[list[Tensor]]) -> None:
    """One half multiplies on a stream of its own while the other one attends."""
    main, beside = torch.cuda.current_stream(), torch.cuda.Stream(priority=-1)
    first, second = halves
    first.attend(0)
    for turn in range(2 * NUM_LAYERS):
        layer = turn // 2
        multiplies, attends = (first, second) if turn % 2 == 0 else (second, first)
        beside.wait_stream(main)
        with torch.cuda.stream(beside):
            if turn + 1 < 2 * NUM_LAYERS:
                attends.attend((turn + 1) // 2)
        multiplies.multiply(weights[layer])
        main.wait_stream(beside)


def at_once(whole: Half, weights: list[list[Tensor]]) -> None:
    main, beside = torch.cuda.current_stream(), torch.cuda.Stream(priority=-1)
    beside.wait_stream(main)
    with torch.cuda.stream(beside):
        for layer in range(NUM_LAYERS):
            whole.attend(layer)
    for layer_weights in weights:
        whole.multiply(layer_weights)
    main.wait_stream(beside)


def measure(num_requests: int, context_len: int) -> dict[str, Any]:
    num_pages = num_requests * -(-context_len // PAGE_SIZE)
    size = (num_pages, PAGE_SIZE, NUM_KV, HEAD_DIM)

    def make(*sizes: int) -> Tensor:
        return torch.empty(sizes, dtype=torch.bfloat16, device=DEVICE).normal_(0, 0.02)

    pools = [(make(*size), make(*size)) for _ in range(NUM_LAYERS)]
    products = (
        (HIDDEN, HIDDEN),
        (2 * INNER, HIDDEN),
        (HIDDEN, INNER),
        (HIDDEN + 2 * NUM_KV * HEAD_DIM, HIDDEN),
    )
    weights = [[make(*sizes) for sizes in products] for _ in range(NUM_LAYERS)]
    whole = Half(num_requests, context_len, pools)
    halves = [Half(num_requests // 2, context_len, pools) for _ in range(2)]

    def in_order() -> None:
        for layer in range(NUM_LAYERS):
            whole.attend(layer)
            whole.multiply(weights[layer])

    def multiply() -> None:
        for layer_weights in weights:
            whole.multiply(layer_weights)

    def attend() -> None:
        for layer in range(NUM_LAYERS):
            whole.attend(layer)

    row = {
        "requests": num_requests,
        "context": context_len,
        "attention_us": graph_us(attend),
        "products_us": graph_us(multiply),
        "in_order_us": graph_us(in_order),
        "halves_in_turns_us": graph_us(lambda: in_turns(halves, weights)),
        "at_once_us": graph_us(lambda: at_once(whole, weights)),
    }
    print({name: round(value, 1) for name, value in row.items()}, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--context", type=int, default=512)
    args = parser.parse_args()
    with torch.inference_mode():
        rows = [measure(count, args.context) for count in args.requests]
    print(write_result("gpu_two_streams", {"layers": rows}))


if __name__ == "__main__":
    main()
