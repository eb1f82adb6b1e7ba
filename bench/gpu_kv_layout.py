"""Attention and the store kernel on two layouts of the KV pool; then what the driver takes for chunks.

`layers` is a run of pages for each layer's keys and for its values. `chunks_C` has chunks of C pages of all
layers: page p lies for every layer and side at index (p // C) * 2 * L * C + p % C of a flat view. Both pools
are resident side by side, and are measured in turns, so that the clocks and the temperature are the same.

With --device cpu --tiny the script runs with a reference in torch, and measures nothing.
"""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import gpu_chunk_calls
import torch
from common import write_result
from gpu_common import parse, parser_of
from torch import Tensor

from ebbtide.srt.device.base import Device
from ebbtide.srt.device.choose import open_device, open_memory_saver
from ebbtide.srt.kernel_cache import add_scripts_to_path
from ebbtide.srt.layers.attention.base import AttentionKind, AttentionShape
from ebbtide.srt.layers.attention.flashinfer_kernels import (
    Workspace,
    decode_kernel,
    module_specs,
    partial_bytes,
    prefill_kernel,
)
from ebbtide.srt.layers.attention.paged_kernel import DevicePages, HostLens, PagedKernel
from ebbtide.srt.layers.heads import Rope
from ebbtide.srt.memory_saver.tags import MemoryTag

_cuda: Any = torch.cuda

LAYER_CHUNK_BYTES = 1 << 30
NUM_REPLAYS = 5


@dataclass(frozen=True)
class Sizes:
    """A model's KV shape, the size of the pools, and what is run on them."""

    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    num_pages: int
    chunk_pages: tuple[int, ...]
    decode: tuple[tuple[int, int], ...]  # (requests, tokens of each)
    prefill: tuple[tuple[int, int], ...]
    stored: tuple[int, ...]  # tokens of a step
    page_size: int = 16

    @property
    def page_bytes(self) -> int:
        """Of one layer's keys, or of its values."""
        return self.page_size * self.num_kv_heads * self.head_dim * 2


LLAMA_8B = Sizes(
    32,
    32,
    8,
    128,
    32768,
    (64, 128, 256, 512),
    ((256, 768), (64, 8192), (16, 32768)),
    ((16, 1024),),
    (256, 8192),
)
TINY = Sizes(2, 4, 2, 64, 64, (4, 16), ((4, 40), (2, 100)), ((2, 48),), (4, 128))


class Pool(Protocol):
    """One layout."""

    name: str

    def view(self, layer: int, side: int) -> Tensor: ...

    def ids(self, pages: Tensor) -> Tensor: ...


class LayerPool:
    """A run of pages for each layer and side, one behind the other."""

    name = "layers"

    def __init__(self, flat: Tensor, sizes: Sizes) -> None:
        shape = (2 * sizes.num_layers, sizes.num_pages, sizes.page_size, sizes.num_kv_heads, sizes.head_dim)
        self._views = flat.view(torch.bfloat16).view(shape)

    def view(self, layer: int, side: int) -> Tensor:
        return self._views[2 * layer + side]

    def ids(self, pages: Tensor) -> Tensor:
        return pages


class ChunkPool:
    """Chunks of `chunk_pages` pages of all layers."""

    def __init__(self, flat: Tensor, sizes: Sizes, chunk_pages: int) -> None:
        self.name = f"chunks_{chunk_pages}"
        self._chunk_pages, self._stride = chunk_pages, 2 * sizes.num_layers * chunk_pages
        self._num_views = flat.nbytes // sizes.page_bytes - self._stride + chunk_pages
        self._flat = flat.view(torch.bfloat16).view(-1, sizes.page_size, sizes.num_kv_heads, sizes.head_dim)

    def view(self, layer: int, side: int) -> Tensor:
        first = (2 * layer + side) * self._chunk_pages
        return self._flat[first : first + self._num_views]

    def ids(self, pages: Tensor) -> Tensor:
        return pages // self._chunk_pages * self._stride + pages % self._chunk_pages


class ReferenceKernel:
    """Attention in torch, for a machine without a GPU."""

    def __init__(self, sizes: Sizes) -> None:
        self._sizes = sizes

    def plan(self, lens: HostLens, *, captured: bool) -> HostLens:
        return lens

    def run(
        self, plan: HostLens, pages: DevicePages, q_TNH: Tensor, k_PSKH: Tensor, v_PSKH: Tensor, out: Tensor
    ) -> None:
        for row, length in enumerate(plan.lens_R.tolist()):
            new = slice(int(plan.q_indptr_R1[row]), int(plan.q_indptr_R1[row + 1]))
            ids = pages.kv_indices[int(plan.kv_indptr_R1[row]) : int(plan.kv_indptr_R1[row + 1])].long()
            k, v = (side[ids].flatten(0, 1)[:length].transpose(0, 1) for side in (k_PSKH, v_PSKH))
            out[new] = torch.nn.functional.scaled_dot_product_attention(
                q_TNH[new].transpose(0, 1), k, v, is_causal=new.stop - new.start > 1, enable_gqa=True
            ).transpose(0, 1)


@dataclass(frozen=True)
class Bench:
    """What all measurements share."""

    sizes: Sizes
    device: Device
    torch_device: torch.device
    decode: PagedKernel
    prefill: PagedKernel
    runs: int

    @property
    def is_cuda(self) -> bool:
        return self.torch_device.type == "cuda"


@dataclass(frozen=True)
class Case:
    """One step of all layers, to be run again and again.

    Attributes:
        launch: launches every kernel. It is kept although `run` may be a graph of it: it holds the tensors
            whose addresses the graph has.
        out: of the last layer.
    """

    run: Callable[[], None]
    launch: Callable[[], None]
    out: Tensor


def attention_case(
    bench: Bench, pool: Pool, num_requests: int, length: int, order: str, *, is_decode: bool
) -> Case:
    """Attention of all layers over `num_requests` contexts."""
    sizes, device = bench.sizes, bench.torch_device
    pages_each = -(-length // sizes.page_size)
    total = num_requests * pages_each
    assert total <= sizes.num_pages
    generator = torch.Generator().manual_seed(7)
    if order == "random":
        pages = torch.randperm(sizes.num_pages, generator=generator)[:total]
    else:  # as requests that decode side by side get them: page by page in turn
        pages = torch.arange(total).view(pages_each, num_requests).t().reshape(-1)
    num_new = 1 if is_decode else length
    q_indptr = torch.arange(num_requests + 1, dtype=torch.int32) * num_new
    kv_indptr = torch.arange(num_requests + 1, dtype=torch.int32) * pages_each
    lens = torch.full((num_requests,), length, dtype=torch.int32)
    last = torch.full((num_requests,), (length - 1) % sizes.page_size + 1, dtype=torch.int32, device=device)
    indices = pool.ids(pages).to(device, torch.int32)
    device_pages = DevicePages(q_indptr.to(device), kv_indptr.to(device), indices, last)
    q_shape = (num_requests * num_new, sizes.num_q_heads, sizes.head_dim)
    q = torch.randn(q_shape, dtype=torch.bfloat16, device=device, generator=_generator(bench, 7))
    out = torch.empty_like(q)
    kernel = bench.decode if is_decode else bench.prefill
    views = [(pool.view(layer, 0), pool.view(layer, 1)) for layer in range(sizes.num_layers)]
    # The plan depends on the lengths alone: it is the same for all pools, which share its memory.
    plan = kernel.plan(HostLens(q_indptr, kv_indptr, lens), captured=is_decode)

    def layers() -> None:
        for k, v in views:
            kernel.run(plan, device_pages, q, k, v, out)

    return Case(captured(bench, layers) if is_decode else layers, layers, out)


def store_case(bench: Bench, pool: Pool, num_tokens: int) -> Case:
    """Keys and values of one step written to all layers, at random places."""
    from ebbtide.srt.layers.kernels.rope import rotate_and_store

    sizes, device = bench.sizes, bench.torch_device
    generator = torch.Generator().manual_seed(11)
    pages = torch.randint(sizes.num_pages, (num_tokens,), generator=generator)
    inside = torch.randint(sizes.page_size, (num_tokens,), generator=generator)
    slots = (pool.ids(pages) * sizes.page_size + inside).to(device)
    heads = sizes.num_q_heads + 2 * sizes.num_kv_heads
    qkv = torch.randn((num_tokens, heads, sizes.head_dim), dtype=torch.bfloat16, device=device)
    cos = torch.ones((num_tokens, 1, sizes.head_dim), dtype=torch.bfloat16, device=device)
    rope = Rope(cos, torch.zeros_like(cos[..., : sizes.head_dim // 2]))
    views = [(pool.view(layer, 0), pool.view(layer, 1)) for layer in range(sizes.num_layers)]

    def layers() -> None:
        for k, v in views:
            rotate_and_store(qkv, rope, None, slots, k, v)

    return Case(captured(bench, layers), layers, qkv)


def captured(bench: Bench, launch: Callable[[], None]) -> Callable[[], None]:
    """A CUDA graph of the launches."""
    if not bench.is_cuda:
        return launch
    with _cuda.stream(_cuda.Stream()):
        launch()
        _cuda.synchronize()
        graph = _cuda.CUDAGraph()
        graph.capture_begin()
        launch()
        graph.capture_end()
    replay: Callable[[], None] = graph.replay
    return replay


def step_ms(bench: Bench, step: Callable[[], None]) -> float:
    """Milliseconds of one step of all layers."""
    if not bench.is_cuda:
        started = time.perf_counter()
        step()
        return (time.perf_counter() - started) * 1e3
    start, end = (_cuda.Event(enable_timing=True) for _ in range(2))
    step()
    start.record()
    for _ in range(NUM_REPLAYS):
        step()
    end.record()
    _cuda.synchronize()
    return float(start.elapsed_time(end)) / NUM_REPLAYS


def compare(bench: Bench, name: str, pools: Sequence[Pool], make: Callable[[Pool], Case]) -> dict[str, Any]:
    """One case on all pools in turns."""
    runs: dict[str, list[float]] = {pool.name: [] for pool in pools}
    cases = {pool.name: make(pool) for pool in pools}
    for _ in range(bench.runs):
        for pool_name, case in cases.items():
            runs[pool_name].append(round(step_ms(bench, case.run), 4))
    base = statistics.median(runs["layers"])
    row: dict[str, Any] = {"case": name, "runs_ms": runs}
    row["median_ms"] = {pool: statistics.median(values) for pool, values in runs.items()}
    row["against_layers"] = {pool: round(value / base, 4) for pool, value in row["median_ms"].items()}
    print(name, row["median_ms"], row["against_layers"], flush=True)
    return row


def check_equal(bench: Bench, pools: Sequence[Pool]) -> dict[str, Any]:
    """Whether the same keys and values give the same outputs in every layout, bit for bit, last pages too."""
    sizes = bench.sizes
    found: dict[str, Any] = {}
    for is_decode in (True, False):
        outputs = []
        for pool in pools:
            num_pages = sizes.num_pages
            generator = torch.Generator().manual_seed(3)
            pages = torch.randperm(num_pages, generator=generator)
            for layer in range(sizes.num_layers):
                for side in (0, 1):
                    shape = (num_pages, sizes.page_size, sizes.num_kv_heads, sizes.head_dim)
                    if layer == sizes.num_layers - 1:
                        seed = _generator(bench, 100 + side)
                        values = torch.randn(
                            shape, dtype=torch.bfloat16, device=bench.torch_device, generator=seed
                        )
                        pool.view(layer, side)[pool.ids(pages).to(bench.torch_device)] = values
            num_requests, length = (4, 16 * num_pages // 8) if is_decode else (2, 16 * num_pages // 64)
            case = attention_case(bench, pool, num_requests, length, "random", is_decode=is_decode)
            case.run()
            bench.device.synchronize()
            outputs.append(case.out.clone())
        kind = "decode" if is_decode else "prefill"
        found[f"{kind}_equal"] = [bool(torch.equal(outputs[0], other)) for other in outputs[1:]]
        found[f"{kind}_finite"] = bool(outputs[0].isfinite().all())
    print(found, flush=True)
    return found


def _generator(bench: Bench, seed: int) -> torch.Generator:
    return torch.Generator(device=bench.torch_device).manual_seed(seed)


def fill(flat: Tensor) -> None:
    """Numbers of ordinary size everywhere: zeros can be quicker."""
    piece_bytes = min(flat.nbytes, 1 << 30)
    piece = torch.randn(piece_bytes // 2, dtype=torch.bfloat16, device=flat.device).view(torch.uint8)
    for room in flat.split(piece_bytes):
        room.copy_(piece[: room.nbytes])


def open_bench(args: Any, sizes: Sizes) -> Bench:
    device = open_device("cuda" if args.device == "cuda" else "cpu")
    torch_device = torch.device(device.name)
    if torch_device.type == "cpu":
        reference = ReferenceKernel(sizes)
        return Bench(sizes, device, torch_device, reference, reference, args.runs)
    kind, dtype = AttentionKind(sizes.head_dim**-0.5), torch.bfloat16
    heads = (sizes.num_q_heads, sizes.num_kv_heads, sizes.head_dim)
    shape = AttentionShape(*heads, sizes.page_size, dtype, dtype, (kind,))
    started = time.perf_counter()
    add_scripts_to_path()
    specs = [spec for spec in module_specs(shape, torch_device).values() if not spec.is_compiled]
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda spec: spec.build(verbose=False), specs))
    print(f"compiled {len(specs)} modules in {time.perf_counter() - started:.0f} s", flush=True)
    room = torch.zeros(partial_bytes(shape, torch_device), dtype=torch.uint8, device=torch_device)
    decode, prefill = (make(shape, kind, Workspace(room)) for make in (decode_kernel, prefill_kernel))
    return Bench(sizes, device, torch_device, decode, prefill, args.runs)


def compare_layouts(bench: Bench, results: dict[str, Any], save: Callable[[], None]) -> None:
    sizes = bench.sizes
    saver = open_memory_saver("auto", bench.device)
    num_bytes = 2 * sizes.num_layers * sizes.num_pages * sizes.page_bytes
    # The handles of the chunked pool are as large as the largest chunk.
    chunk_bytes = 2 * sizes.num_layers * sizes.chunk_pages[-1] * sizes.page_bytes
    arenas = [saver.arena(MemoryTag.KV_CACHE, num_bytes, step) for step in (LAYER_CHUNK_BYTES, chunk_bytes)]
    flats = []
    for arena in arenas:
        arena.resume()
        flats.append(arena.view(0, (num_bytes,), torch.uint8))
        fill(flats[-1])
    pools: list[Pool] = [LayerPool(flats[0], sizes)]
    pools += [ChunkPool(flats[1], sizes, chunk_pages) for chunk_pages in sizes.chunk_pages]
    print("pools:", ", ".join(pool.name for pool in pools), flush=True)
    rows: list[dict[str, Any]] = []
    results["layouts"] = {"pool_bytes": num_bytes, "chunk_bytes": chunk_bytes, "rows": rows}
    with torch.inference_mode():
        for order in ("in_turn", "random"):
            for num_requests, length in sizes.decode:
                name = f"decode {num_requests}x{length} {order}"
                rows.append(compare(bench, name, pools, _maker(bench, num_requests, length, order, True)))
                save()
        for num_requests, length in sizes.prefill:
            name = f"prefill {num_requests}x{length}"
            rows.append(compare(bench, name, pools, _maker(bench, num_requests, length, "in_turn", False)))
        for num_tokens in sizes.stored if bench.is_cuda else ():
            name = f"store {num_tokens}"
            rows.append(compare(bench, name, pools, partial(store_case, bench, num_tokens=num_tokens)))
        save()
        results["layouts"].update(check_equal(bench, pools))
        save()
    del pools, flats
    for arena in arenas:
        arena.close()


def _maker(
    bench: Bench, num_requests: int, length: int, order: str, is_decode: bool
) -> Callable[[Pool], Case]:
    return lambda pool: attention_case(bench, pool, num_requests, length, order, is_decode=is_decode)


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.set_defaults(runs=7)
    args = parse(parser, argv)
    bench = open_bench(args, TINY if args.tiny else LLAMA_8B)
    results: dict[str, Any] = {}

    def save() -> None:
        if bench.is_cuda and not args.tiny:
            write_result("gpu_kv_layout", results)

    for part in (
        lambda: compare_layouts(bench, results, save),
        lambda: gpu_chunk_calls.measure(bench.device, results, save, bench.runs, is_tiny=args.tiny),
    ):
        try:
            part()
        except Exception as error:
            traceback.print_exc()
            results.setdefault("errors", []).append(f"{type(error).__name__}: {error}")
        save()


if __name__ == "__main__":
    main()
