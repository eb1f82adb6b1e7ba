"""FlashInfer on a GPU against torch's own attention in float32: eager, and captured in CUDA graphs.

Shapes: T tokens, R requests, B requests of a graph, N query heads, K KV heads, H head_dim, S page_size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from ebbtide.srt.kernel_cache import flashinfer_problem
from ebbtide.srt.layers.attention.base import AttentionBackend, HeadNorms
from ebbtide.srt.layers.attention.flashinfer import DecodeBuffers, FlashInferAttention
from ebbtide.srt.layers.attention.registry import build_attention
from ebbtide.srt.layers.rotary import Rope, RopeConfig, RotaryEmbedding

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.skipif(flashinfer_problem() is not None, reason="needs FlashInfer"),
]

PAGE_SIZE, NUM_LAYERS, LAYER = 16, 2, 1
# bfloat16 keeps 8 bits of queries, keys, values and outputs.
TOLERANCE = 3e-2
# (query heads, KV heads, head_dim): groups of 1, 2, 4 on CUDA cores, of 7 and 8 on tensor cores.
SHAPES = [(4, 4, 64), (4, 2, 128), (8, 2, 128), (14, 2, 64), (14, 2, 128), (16, 2, 128)]


class Pool:
    """Keys and values on the GPU, undefined (not a number) at first."""

    def __init__(self, num_pages: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        shape = (NUM_LAYERS, num_pages, PAGE_SIZE, num_kv_heads, head_dim)
        self.keys = torch.full(shape, float("nan"), dtype=dtype, device="cuda")
        self.values = self.keys.clone()

    def k(self, layer: int) -> Tensor:
        return self.keys[layer]

    def v(self, layer: int) -> Tensor:
        return self.values[layer]


@dataclass
class Batch:
    """A `CudaBatch`."""

    num_new_R: NDArray[np.int32]
    lens_R: NDArray[np.int32]
    page_table_RP: NDArray[np.int32]
    slots_T: Tensor
    kv_indices: Tensor
    kv_indptr_R1: NDArray[np.int32]
    q_indptr_R1: NDArray[np.int32]
    last_page_len_R: NDArray[np.int32]
    kv_indptr_dev: Tensor
    q_indptr_dev: Tensor
    last_page_len_dev: Tensor


class Requests:
    """Requests that grow, each with pages of its own in a shuffled pool."""

    def __init__(self, num_requests: int, max_len: int, num_spare_pages: int = 4) -> None:
        width = -(-max_len // PAGE_SIZE)
        self.num_pages = num_requests * width + num_spare_pages
        shuffled = np.random.default_rng(0).permutation(self.num_pages).astype(np.int32)
        self.table = shuffled[: num_requests * width].reshape(num_requests, width)
        self.spare_pages = shuffled[num_requests * width :]
        self.lens = np.zeros(num_requests, dtype=np.int32)

    def grow(self, num_new: list[int]) -> tuple[Batch, Tensor]:
        """A batch of the requests that get new tokens, and the positions of these."""
        new = np.array(num_new, dtype=np.int32)
        rows = np.flatnonzero(new)
        positions = [np.arange(self.lens[row], self.lens[row] + new[row], dtype=np.int64) for row in rows]
        slots = [
            self.table[row, at // PAGE_SIZE].astype(np.int64) * PAGE_SIZE + at % PAGE_SIZE
            for row, at in zip(rows, positions, strict=True)
        ]
        self.lens = self.lens + new
        lens, new = self.lens[rows], new[rows]
        num_pages = -(-lens // PAGE_SIZE)
        indices = np.concatenate([self.table[row, :n] for row, n in zip(rows, num_pages, strict=True)])
        kv_indptr, q_indptr = indptr(num_pages), indptr(new)
        last = (lens - (num_pages - 1) * PAGE_SIZE).astype(np.int32)
        batch = Batch(
            new,
            lens,
            self.table[rows],
            cuda(np.concatenate(slots)),
            cuda(indices),
            kv_indptr,
            q_indptr,
            last,
            cuda(kv_indptr),
            cuda(q_indptr),
            cuda(last),
        )
        return batch, cuda(np.concatenate(positions))


def indptr(lengths: NDArray[np.int32]) -> NDArray[np.int32]:
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)


def cuda(array: NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(array).cuda()


def random_qkv(num_tokens: int, shape: tuple[int, int, int], seed: int) -> Tensor:
    num_q, num_kv, head_dim = shape
    generator = torch.Generator().manual_seed(seed)
    qkv = torch.randn(num_tokens, num_q + 2 * num_kv, head_dim, generator=generator)
    return qkv.cuda().to(torch.bfloat16)


class Both:
    """FlashInfer in bfloat16 and torch in float32, over pools of the same requests."""

    def __init__(self, shape: tuple[int, int, int], num_pages: int) -> None:
        self.shape = num_q, num_kv, head_dim = shape
        self.pool = Pool(num_pages, num_kv, head_dim, torch.bfloat16)
        self.wide_pool = Pool(num_pages, num_kv, head_dim, torch.float32)
        self.backend = build_attention("flashinfer", self.pool, NUM_LAYERS, torch.bfloat16, num_q)
        self.torch_native = build_attention("torch_native", self.wide_pool, NUM_LAYERS, torch.float32, num_q)
        self.rotary = RotaryEmbedding(RopeConfig("default", 10_000.0), head_dim, torch.device("cuda"))

    def expected(self, batch: Batch, qkv: Tensor, positions: Tensor, norms: HeadNorms | None) -> Tensor:
        wide = HeadNorms(norms.q_weight.float(), norms.k_weight.float(), norms.eps) if norms else None
        self.torch_native.prepare(batch)
        rope = self.rotary(positions, torch.float32)
        return self.torch_native.forward(LAYER, qkv.float(), rope, wide)

    def eager(self, batch: Batch, qkv: Tensor, positions: Tensor, norms: HeadNorms | None) -> Tensor:
        self.backend.prepare(batch)
        return self.backend.forward(LAYER, qkv, self.rotary(positions, torch.bfloat16), norms)

    def step(self, requests: Requests, num_new: list[int], norms: HeadNorms | None) -> None:
        """Run a batch in both, and compare."""
        batch, positions = requests.grow(num_new)
        qkv = random_qkv(len(positions), self.shape, seed=int(requests.lens.sum()))
        expected = self.expected(batch, qkv, positions, norms)
        near(self.eager(batch, qkv, positions, norms), expected)


def near(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual.float(), expected, rtol=TOLERANCE, atol=TOLERANCE)


def head_norms(head_dim: int) -> HeadNorms:
    weight = torch.linspace(0.5, 1.5, head_dim, device="cuda").to(torch.bfloat16)
    return HeadNorms(weight, weight.flip(0), 1e-6)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("normalised", [False, True])
def test_prefill_chunks_and_decode_agree_with_torch(shape: tuple[int, int, int], normalised: bool) -> None:
    norms = head_norms(shape[2]) if normalised else None
    requests = Requests(6, 700)
    both = Both(shape, requests.num_pages)
    for num_new in (
        [300, 1, 16, 17, 0, 64],  # prefill
        [1, 1, 200, 1, 129, 33],  # chunks after cached tokens, beside decoding
        [1, 1, 1, 1, 1, 1],
        [1, 0, 1, 0, 0, 1],
        [0, 300, 0, 0, 1, 0],
    ):
        both.step(requests, num_new, norms)
    assert both.pool.keys[1 - LAYER].isnan().all()
    assert both.pool.keys[LAYER][torch.from_numpy(requests.spare_pages).long().cuda()].isnan().all()


@pytest.mark.parametrize("shape", [(8, 2, 128), (14, 2, 128)], ids=str)
@pytest.mark.parametrize("num_requests", [700])
def test_a_large_decode_batch_agrees_with_torch(shape: tuple[int, int, int], num_requests: int) -> None:
    requests = Requests(num_requests, 40)
    both = Both(shape, requests.num_pages)
    both.step(requests, [1 + row % 37 for row in range(num_requests)], None)
    both.step(requests, [1] * num_requests, None)


class CapturedStep:
    """A decode step in a CUDA graph, with the inputs at fixed addresses."""

    def __init__(self, both: Both, size: int, max_pages: int) -> None:
        num_q, num_kv, head_dim = both.shape
        assert isinstance(both.backend, FlashInferAttention)
        self.size = size
        self.qkv = torch.zeros(size, num_q + 2 * num_kv, head_dim, dtype=torch.bfloat16, device="cuda")
        self.rope = both.rotary(torch.zeros(size, dtype=torch.int64, device="cuda"), torch.bfloat16)
        self.buffers = DecodeBuffers(
            torch.full((size,), -1, dtype=torch.int64, device="cuda"),
            torch.zeros(size + 1, dtype=torch.int32, device="cuda"),
            torch.zeros(max_pages, dtype=torch.int32, device="cuda"),
            torch.zeros(size, dtype=torch.int32, device="cuda"),
        )
        self.attention = both.backend.graph(size, self.buffers)
        self.attention.plan(np.arange(size + 1, dtype=np.int32), np.ones(size, dtype=np.int32))
        self.graph = torch.cuda.CUDAGraph()
        run(self.attention, self.qkv, self.rope)
        with torch.cuda.graph(self.graph):
            self.out = run(self.attention, self.qkv, self.rope)

    def replay(self, batch: Batch, qkv: Tensor, rope: Rope) -> Tensor:
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
        self.buffers.kv_indptr_B1.copy_(cuda(page_offsets))
        self.buffers.kv_indices.zero_()
        self.buffers.kv_indices[: len(batch.kv_indices)] = batch.kv_indices
        self.buffers.last_page_len_B.copy_(cuda(last))
        self.attention.plan(page_offsets, last)
        self.graph.replay()
        return self.out[:num]


def run(attention: AttentionBackend, qkv: Tensor, rope: Rope) -> Tensor:
    return attention.forward(LAYER, qkv, rope, None)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
# The last one has blocks enough for every multiprocessor without splitting any request.
@pytest.mark.parametrize(("num_requests", "size"), [(1, 1), (5, 8), (8, 8), (600, 640)])
def test_replayed_graphs_agree_with_torch_and_padding_is_not_stored(
    shape: tuple[int, int, int], num_requests: int, size: int
) -> None:
    max_len = 600 if num_requests < 10 else 60
    requests = Requests(num_requests, max_len)
    both = Both(shape, requests.num_pages)
    captured = CapturedStep(both, size, requests.num_pages + size)
    both.step(requests, [1 + (row * 97) % (max_len - 20) for row in range(num_requests)], None)
    for _ in range(3):
        batch, positions = requests.grow([1] * num_requests)
        qkv = random_qkv(num_requests, shape, seed=int(requests.lens.sum()))
        expected = both.expected(batch, qkv, positions, None)

        near(captured.replay(batch, qkv, both.rotary(positions, torch.bfloat16)), expected)
        # An eager step between replays uses the same workspace.
        near(both.eager(batch, qkv, positions, None), expected)
    assert both.pool.keys[LAYER][torch.from_numpy(requests.spare_pages).long().cuda()].isnan().all()


@pytest.mark.parametrize("shape", [(8, 2, 128), (14, 2, 128)], ids=str)
def test_planning_does_not_wait_for_the_device(shape: tuple[int, int, int]) -> None:
    requests = Requests(4, 100)
    both = Both(shape, requests.num_pages)
    captured = CapturedStep(both, 4, requests.num_pages)
    prefill, _ = requests.grow([20, 30, 40, 50])
    decode, _ = requests.grow([1, 1, 1, 1])
    for prepare in (
        lambda: both.backend.prepare(prefill),
        lambda: both.backend.prepare(decode),
        lambda: captured.attention.plan(decode.kv_indptr_R1, decode.last_page_len_R),
    ):
        torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000_000)  # cycles: about a second
        busy = torch.cuda.Event()
        busy.record()

        prepare()

        assert not busy.query()
