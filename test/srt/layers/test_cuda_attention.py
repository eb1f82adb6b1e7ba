"""Backends with CUDA graphs against torch's own attention in float32: eager, and captured.

Shapes: T tokens, R requests, B requests of a graph, N query heads, K KV heads, H head_dim, S page_size.
"""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from fixtures.kernels import HAS_GPU
from fixtures.paged_requests import Pool, Requests
from torch import Tensor

from ebbtide.srt.layers.attention.base import (
    AttentionBackend,
    AttentionShape,
    AttentionStep,
    DecodeBuffers,
    GraphFamily,
    LayerAttention,
    PagedBatch,
)
from ebbtide.srt.layers.attention.registry import ATTENTION_BACKENDS, backends_for
from ebbtide.srt.layers.attention.shared_runs import NO_RUNS, SharedRuns
from ebbtide.srt.layers.heads import AttentionKind, HeadNorms, Rope
from ebbtide.srt.layers.rotary import RopeConfig, RotaryEmbedding
from ebbtide.srt.mem_cache import Latent
from ebbtide.srt.mem_cache.kv_scales import FP8, KVScales

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA GPU")]

Heads = tuple[int, int, int]
PAGE_SIZE, NUM_LAYERS, LAYER = 16, 2, 1
# bfloat16 keeps 8 bits of queries, keys, values and outputs. Where a key lies between two numbers of FP8,
# they decide which it becomes.
TOLERANCE, FP8_TOLERANCE = 3e-2, 0.15
BACKENDS = [name for name, backend in ATTENTION_BACKENDS.items() if backend.captures]
# (query heads, KV heads, head_dim): groups of 1, 2, 4 on CUDA cores, of 7 and 8 on tensor cores; and heads
# that are no power of two, groups larger than a tile, and groups of 3.
SHAPES = [
    (4, 4, 64),
    (4, 2, 128),
    (8, 2, 128),
    (14, 2, 64),
    (14, 2, 128),
    (16, 2, 128),
    (8, 4, 256),
    (6, 2, 96),
    (40, 2, 80),
]
PLAIN, WINDOWED = AttentionKind(0.1), AttentionKind(0.1, window=40)
# Each combination of a head size and a kind is compiled for itself, which takes FlashInfer a while.
CAPPED = AttentionKind(0.1, window=7, soft_cap=2.0)
CASES: list[tuple[Heads, AttentionKind, float | None]] = [
    *((heads, PLAIN, None) for heads in SHAPES),
    ((4, 2, 128), WINDOWED, None),
    ((14, 2, 128), WINDOWED, None),
    ((8, 2, 128), AttentionKind(0.1, soft_cap=2.0), None),
    ((8, 4, 256), CAPPED, None),
]
# The layers of these have sinks where their pages are not in FP8.
WITH_SINKS = {(4, 4, 64), (14, 2, 64), (14, 2, 128), (6, 2, 96)}
# The last number: what keys and values in FP8 are multiplied by.
FP8_CASES: list[tuple[Heads, AttentionKind, float | None]] = [
    ((8, 2, 128), PLAIN, 1.0),
    ((8, 2, 128), PLAIN, 0.03),
    ((4, 4, 128), PLAIN, 1.0),
    ((14, 2, 128), WINDOWED, 1.0),
    ((8, 4, 256), CAPPED, 0.25),
    ((6, 2, 96), PLAIN, 0.03),
]


class Both:
    """A backend in bfloat16 and torch's in float32, over pools of the same requests."""

    def __init__(
        self,
        name: str,
        heads: Heads,
        num_pages: int,
        kind: AttentionKind = PLAIN,
        fp8_scale: float | None = None,
        latent: Latent | None = None,
    ) -> None:
        self.heads, self.latent = heads, latent
        num_q, num_kv, _ = heads
        self.num_projected = num_q + (2 * num_kv if latent is None else 1)
        self.tolerance = TOLERANCE if fp8_scale is None else FP8_TOLERANCE
        _, num_kv, head_dim = heads
        # The other layer is of another kind: a step is planned for both.
        has_sinks = heads in WITH_SINKS and fp8_scale is None
        sinks_N = torch.linspace(-2.0, 4.0, heads[0], device="cuda") if has_sinks else None
        self.layers = [LayerAttention(0, PLAIN), LayerAttention(LAYER, kind, sinks_N)]
        self.kinds = tuple(dict.fromkeys((PLAIN, kind)))
        size = (NUM_LAYERS, num_pages, PAGE_SIZE, num_kv, head_dim)
        self.pool, self.wide_pool = (
            Pool(*size, dtype if fp8_scale is None else FP8, "cuda", scales_of(fp8_scale, num_kv), latent)
            for dtype in (torch.bfloat16, torch.float32)
        )
        self.backend = self._build(name, self.pool, torch.bfloat16)
        self.torch_native = self._build("torch_native", self.wide_pool, torch.float32)
        num_rotated = head_dim if latent is None else latent.rope
        self.rotary = RotaryEmbedding(RopeConfig("default", 10_000.0), num_rotated, torch.device("cuda"))

    def _build(self, name: str, pool: Pool, dtype: torch.dtype) -> AttentionBackend:
        num_q, num_kv, head_dim = self.heads
        sizes = num_q, num_kv, head_dim, PAGE_SIZE, dtype, pool.keys.dtype, self.kinds
        shape = AttentionShape(*sizes, latent=self.latent)
        if (problem := backends_for(shape)[name].problem(shape, torch.device("cuda"))) is not None:
            pytest.skip(problem)
        return backends_for(shape)[name](pool, self.layers, shape)

    def families(self, sizes: list[int]) -> dict[str, GraphFamily]:
        return {family.name: family for family in self.backend.graph_families(sizes)}

    def random_qkv(self, num_tokens: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        qkv = torch.randn(num_tokens, self.num_projected, self.heads[2], generator=generator)
        return qkv.cuda().to(torch.bfloat16)

    def expected(self, batch: PagedBatch, qkv: Tensor, positions: Tensor, norms: HeadNorms | None) -> Tensor:
        wide = norms and HeadNorms(norms.q_weight.float(), norms.k_weight.float(), norms.eps, norms.offset)
        rope = self.rotary(positions, torch.float32)
        return self.layers[LAYER](qkv.float(), rope, wide, self.torch_native.prepare(batch))

    def eager(self, batch: PagedBatch, qkv: Tensor, positions: Tensor, norms: HeadNorms | None) -> Tensor:
        step = self.backend.prepare(batch)
        return self.layers[LAYER](qkv, self.rotary(positions, torch.bfloat16), norms, step)

    def step(self, requests: Requests, num_new: list[int], norms: HeadNorms | None) -> None:
        """Run a batch in both, and compare."""
        batch, positions = requests.grow(num_new)
        qkv = self.random_qkv(len(positions), seed=int(requests.lens.sum()))
        expected = self.expected(batch, qkv, positions, norms)
        self.near(self.eager(batch, qkv, positions, norms), expected)

    def near(self, actual: Tensor, expected: Tensor) -> None:
        assert actual.dtype == torch.bfloat16
        torch.testing.assert_close(actual.float(), expected, rtol=self.tolerance, atol=self.tolerance)


def scales_of(fp8_scale: float | None, num_kv_heads: int) -> KVScales | None:
    """Of each head another one, around this; 1 and None are for no scales."""
    if fp8_scale in (None, 1.0):
        return None
    scales = fp8_scale * 2.0 ** torch.arange(2 * num_kv_heads, device="cuda").remainder(3)
    return KVScales(scales.view(1, 2, -1).repeat(NUM_LAYERS, 1, 1))


def case_id(value: Any) -> str:
    return f"fp8x{value}" if isinstance(value, float) else str(value)


def head_norms(head_dim: int, offset: float = 0.0) -> HeadNorms:
    weight = torch.linspace(0.5, 1.5, head_dim, device="cuda").to(torch.bfloat16) - offset
    return HeadNorms(weight, weight.flip(0), 1e-6, offset)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(("heads", "kind", "fp8_scale"), [*CASES, *FP8_CASES], ids=case_id)
@pytest.mark.parametrize("norm_offset", [None, 0.0, 1.0])
def test_prefill_chunks_and_decode_agree_with_torch(
    name: str, heads: Heads, kind: AttentionKind, fp8_scale: float | None, norm_offset: float | None
) -> None:
    norms = None if norm_offset is None else head_norms(heads[2], norm_offset)
    requests = Requests(6, 700, PAGE_SIZE, device="cuda")
    both = Both(name, heads, requests.num_pages, kind, fp8_scale)
    for num_new in (
        [300, 1, 16, 17, 0, 64],  # prefill
        [1, 1, 200, 1, 129, 33],  # chunks after cached tokens, beside decoding
        [1, 1, 1, 1, 1, 1],
        [1, 0, 1, 0, 0, 1],
        [0, 300, 0, 0, 1, 0],
    ):
        both.step(requests, num_new, norms)
    assert both.pool.keys[1 - LAYER].float().isnan().all()
    if fp8_scale is not None:
        # Values are not rotated: bit for bit what torch makes of them.
        assert torch.equal(both.pool.values.view(torch.uint8), both.wide_pool.values.view(torch.uint8))
    assert both.pool.keys[LAYER].float()[requests.spare_pages].isnan().all()


class CapturedStep:
    """A decode step in a CUDA graph, with the inputs at fixed addresses."""

    def __init__(self, both: Both, size: int, max_pages: int, family: str = "any") -> None:
        self.size, self.layer = size, both.layers[LAYER]
        shape = (size, both.num_projected, both.heads[2])
        self.qkv = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
        self.rope = both.rotary(torch.zeros(size, dtype=torch.int64, device="cuda"), torch.bfloat16)
        self.buffers = DecodeBuffers(
            torch.full((size,), -1, dtype=torch.int64, device="cuda"),
            torch.arange(size + 1, dtype=torch.int32, device="cuda"),
            torch.zeros(max_pages, dtype=torch.int32, device="cuda"),
            torch.ones(size, dtype=torch.int32, device="cuda"),
        )
        self.attention = both.families([size])[family].capture(size, self.buffers)
        self.attention.plan(np.arange(size + 1, dtype=np.int32), np.ones(size, dtype=np.int32))
        self.graph = torch.cuda.CUDAGraph()
        self.run(self.attention)
        with torch.cuda.graph(self.graph):
            self.out = self.run(self.attention)

    def run(self, step: AttentionStep) -> Tensor:
        return self.layer(self.qkv, self.rope, None, step)

    def replay(self, batch: PagedBatch, qkv: Tensor, rope: Rope, runs: SharedRuns | None = None) -> Tensor:
        """Rows beyond the batch keep what the last replay left there, but have no slot."""
        num = len(qkv)
        padding = self.size - num
        page_offsets = np.concatenate(
            (batch.kv_indptr_R1, batch.kv_indptr_R1[-1] + np.arange(1, padding + 1))
        ).astype(np.int32)
        last = np.concatenate((batch.last_page_len_R, np.ones(padding))).astype(np.int32)
        self.qkv[:num] = qkv
        self.rope.cos_T1H[:num], self.rope.sin_T1H[:num] = rope
        self.buffers.slots_B.fill_(-1)
        self.buffers.slots_B[:num] = batch.slots_T
        self.buffers.kv_indptr_B1.copy_(torch.from_numpy(page_offsets))
        self.buffers.kv_indices.zero_()
        kv_indices = batch.pages.kv_indices
        self.buffers.kv_indices[: len(kv_indices)] = kv_indices
        self.buffers.last_page_len_B.copy_(torch.from_numpy(last))
        self.attention.plan(page_offsets, last, runs)
        self.graph.replay()
        return self.out[:num]


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(("heads", "kind", "fp8_scale"), [*CASES, *FP8_CASES], ids=case_id)
# The last one has blocks enough for every multiprocessor without splitting any request.
@pytest.mark.parametrize(("num_requests", "size"), [(1, 1), (5, 8), (8, 8), (600, 640)])
def test_replayed_graphs_agree_with_torch_and_padding_is_not_stored(
    name: str, heads: Heads, kind: AttentionKind, fp8_scale: float | None, num_requests: int, size: int
) -> None:
    max_len = 600 if num_requests < 10 else 60
    requests = Requests(num_requests, max_len, PAGE_SIZE, device="cuda")
    both = Both(name, heads, requests.num_pages, kind, fp8_scale)
    captured = [
        CapturedStep(both, size, requests.num_pages + size, family.name)
        for family in both.families([size]).values()
        if family.sizes and not family.shares
    ]
    both.step(requests, [1 + (row * 97) % (max_len - 20) for row in range(num_requests)], None)
    for _ in range(3):
        batch, positions = requests.grow([1] * num_requests)
        qkv = both.random_qkv(num_requests, seed=int(requests.lens.sum()))
        expected = both.expected(batch, qkv, positions, None)

        for step in captured:
            both.near(step.replay(batch, qkv, both.rotary(positions, torch.bfloat16)), expected)
        # An eager step between replays uses the same workspace.
        both.near(both.eager(batch, qkv, positions, None), expected)
    assert both.pool.keys[LAYER].float()[requests.spare_pages].isnan().all()


# Few heads; those of GLM-4.7-Flash; so many that two blocks work together.
@pytest.mark.parametrize("num_heads", [4, 20, 128])
def test_latents_are_attended_to_as_by_torch_eager_and_in_graphs(num_heads: int) -> None:
    requests = Requests(6, 700, PAGE_SIZE, device="cuda")
    heads = (num_heads, 1, 576)
    both = Both("flashinfer", heads, requests.num_pages, latent=Latent(rank=512, rope=64))
    captured = CapturedStep(both, 8, requests.num_pages + 8)
    for num_new in ([300, 1, 16, 17, 0, 64], [1, 1, 200, 1, 129, 33], [0, 300, 0, 0, 1, 0]):
        both.step(requests, num_new, None)
    for _ in range(3):
        batch, positions = requests.grow([1] * 6)
        qkv = both.random_qkv(6, seed=int(requests.lens.sum()))
        expected = both.expected(batch, qkv, positions, None)
        both.near(captured.replay(batch, qkv, both.rotary(positions, torch.bfloat16)), expected)
        both.near(both.eager(batch, qkv, positions, None), expected)
    assert both.pool.keys[1 - LAYER].isnan().all()
    assert both.pool.keys[LAYER][requests.spare_pages].isnan().all()


@pytest.mark.parametrize(
    ("heads", "kind", "fp8_scale"),
    [case for case in CASES if case[0] in ((4, 2, 128), (8, 2, 128), (14, 2, 128))] + FP8_CASES[:2],
    ids=case_id,
)
# Groups of requests, requests of each, pages that they share, and requests of the graph.
@pytest.mark.parametrize(("groups", "count", "num_shared", "size"), [(3, 5, 20, 16), (40, 9, 6, 384)])
def test_graphs_that_read_shared_pages_once_agree_with_torch(
    heads: Heads,
    kind: AttentionKind,
    fp8_scale: float | None,
    groups: int,
    count: int,
    num_shared: int,
    size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_requests, shared_len = groups * count, num_shared * PAGE_SIZE
    requests = Requests(num_requests, shared_len + 150, PAGE_SIZE, device="cuda")
    both = Both("flashinfer", heads, requests.num_pages, kind, fp8_scale)
    captured = CapturedStep(both, size, requests.num_pages + size, "shared")
    # The first of each group brings the pages for the others.
    both.step(requests, [shared_len * (row % count == 0) for row in range(num_requests)], None)
    first = np.arange(num_requests) // count * count
    requests.table[:, :num_shared] = requests.table[first, :num_shared]
    requests.lens[:] = shared_len
    both.step(requests, [1 + (row * 97) % 130 for row in range(num_requests)], None)
    rows = np.arange(groups, dtype=np.int32) * count
    runs = SharedRuns(rows, np.full_like(rows, count), np.full_like(rows, num_shared))
    for shared in (runs, NO_RUNS, runs):
        batch, positions = requests.grow([1] * num_requests)
        qkv = both.random_qkv(num_requests, seed=int(requests.lens.sum()))
        expected = both.expected(batch, qkv, positions, None)

        both.near(captured.replay(batch, qkv, both.rotary(positions, torch.bfloat16), shared), expected)
        # An eager step finds by itself what neighbours share.
        is_worth_it = shared is runs
        monkeypatch.setattr(both.backend, "is_worth_sharing", lambda *_, answer=is_worth_it: answer)
        both.near(both.eager(batch, qkv, positions, None), expected)


@pytest.mark.parametrize("heads", [(8, 2, 128), (14, 2, 128)], ids=str)
@pytest.mark.parametrize("name", BACKENDS)
def test_planning_does_not_wait_for_the_device(name: str, heads: Heads) -> None:
    requests = Requests(4, 100, PAGE_SIZE, device="cuda")
    both = Both(name, heads, requests.num_pages)
    captured = [CapturedStep(both, 4, requests.num_pages, family) for family in both.families([4])]
    prefill, _ = requests.grow([20, 30, 40, 50])
    decode, _ = requests.grow([1, 1, 1, 1])
    for prepare in (
        lambda: both.backend.prepare(prefill),
        lambda: both.backend.prepare(decode),
        *(partial(step.attention.plan, decode.kv_indptr_R1, decode.last_page_len_R) for step in captured),
    ):
        torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000_000)  # cycles: about a second
        busy = torch.cuda.Event()
        busy.record()

        prepare()

        assert not busy.query()
