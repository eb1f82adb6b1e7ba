"""Attention on the CPU against attention written down plainly. GPU backends: test_flashinfer.py."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from ebbtide.srt.errors import ConfigurationError
from ebbtide.srt.layers.attention.base import HeadNorms
from ebbtide.srt.layers.attention.registry import build_attention
from ebbtide.srt.layers.rotary import RopeConfig, RotaryEmbedding, rotate

NUM_LAYERS, NUM_PAGES, PAGE_SIZE, HEAD_DIM, NUM_Q_HEADS = 2, 24, 4, 8, 4
CPU_BACKENDS = ["torch_native"]
ROTARY = RotaryEmbedding(RopeConfig("default", 100.0), HEAD_DIM, torch.device("cpu"))
NORMS = HeadNorms(torch.linspace(0.5, 2.0, HEAD_DIM), torch.linspace(-1.0, 1.0, HEAD_DIM), 1e-5)


class Pool:
    """Keys and values on the heap, undefined (not a number) at first."""

    def __init__(self, num_kv_heads: int) -> None:
        shape = (NUM_PAGES, PAGE_SIZE, num_kv_heads, HEAD_DIM)
        self._k = [torch.full(shape, float("nan")) for _ in range(NUM_LAYERS)]
        self._v = [torch.full(shape, float("nan")) for _ in range(NUM_LAYERS)]

    def k(self, layer: int) -> Tensor:
        return self._k[layer]

    def v(self, layer: int) -> Tensor:
        return self._v[layer]


@dataclass
class Batch:
    num_new_R: NDArray[np.int32]
    lens_R: NDArray[np.int32]
    page_table_RP: NDArray[np.int32]
    slots_T: Tensor


def normalise(x_TNH: Tensor, weight_H: Tensor) -> Tensor:
    return F.rms_norm(x_TNH, weight_H.shape, weight_H, NORMS.eps)


def plain_attention(q_TNH: Tensor, k_LKH: Tensor, v_LKH: Tensor) -> Tensor:
    """The last T of L positions attend to everything up to themselves; float64."""
    group = q_TNH.shape[1] // k_LKH.shape[1]
    out = torch.empty_like(q_TNH, dtype=torch.float64)
    for t, q_NH in enumerate(q_TNH.double()):
        end = len(k_LKH) - len(q_TNH) + t + 1
        for head, q_H in enumerate(q_NH):
            k_LH, v_LH = k_LKH[:end, head // group].double(), v_LKH[:end, head // group].double()
            weights = (k_LH @ q_H / HEAD_DIM**0.5).softmax(0)
            out[t, head] = weights @ v_LH
    return out


@pytest.mark.parametrize("name", CPU_BACKENDS)
@settings(deadline=None, max_examples=60)
@given(
    # Per request: tokens that are cached before, and the new tokens of each step.
    shapes=st.lists(
        st.tuples(st.integers(0, 9), st.lists(st.integers(0, 6), min_size=3, max_size=3)),
        min_size=1,
        max_size=3,
    ),
    num_kv_heads=st.sampled_from([1, 2, 4]),
    head_norms=st.sampled_from([None, NORMS]),
    seed=st.integers(0, 2**16),
)
def test_backends_agree_with_plain_attention(
    name: str,
    shapes: list[tuple[int, list[int]]],
    num_kv_heads: int,
    head_norms: HeadNorms | None,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    pages = torch.randperm(NUM_PAGES, generator=generator)[: 8 * len(shapes)].reshape(len(shapes), 8)
    table = pages.numpy().astype(np.int32)
    pool = Pool(num_kv_heads)
    attention = build_attention(name, pool, NUM_LAYERS, torch.float32, NUM_Q_HEADS)
    keys = [torch.empty(0, num_kv_heads, HEAD_DIM) for _ in shapes]
    values = [torch.empty(0, num_kv_heads, HEAD_DIM) for _ in shapes]
    for step in range(4):
        num_new = [cached if step == 0 else steps[step - 1] for cached, steps in shapes]
        rows = [row for row, new in enumerate(num_new) if new]
        if not rows:
            continue
        starts = [len(keys[row]) for row in rows]
        positions = [
            position
            for row, start in zip(rows, starts, strict=True)
            for position in range(start, start + num_new[row])
        ]
        table_rows = [row for row in rows for _ in range(num_new[row])]
        slots = [
            int(table[row, position // PAGE_SIZE]) * PAGE_SIZE + position % PAGE_SIZE
            for row, position in zip(table_rows, positions, strict=True)
        ]
        qkv = torch.randn(len(slots), NUM_Q_HEADS + 2 * num_kv_heads, HEAD_DIM, generator=generator)
        q, k, v = torch.split(qkv, [NUM_Q_HEADS, num_kv_heads, num_kv_heads], dim=1)
        if head_norms is not None:
            q, k = normalise(q, head_norms.q_weight), normalise(k, head_norms.k_weight)
        rope = ROTARY(torch.tensor(positions), torch.float32)
        q, k = rotate(q, *rope), rotate(k, *rope)
        new = np.array([num_new[row] for row in rows], dtype=np.int32)
        lens = np.array(starts, dtype=np.int32) + new
        attention.prepare(Batch(new, lens, table[rows], torch.tensor(slots)))

        out = attention.forward(1, qkv.clone(), rope, head_norms)

        first = 0
        for row in rows:
            part = slice(first, first + num_new[row])
            keys[row] = torch.cat((keys[row], k[part]))
            values[row] = torch.cat((values[row], v[part]))
            expected = plain_attention(q[part], keys[row], values[row])
            torch.testing.assert_close(out[part].double(), expected, rtol=1e-4, atol=1e-5)
            first = part.stop
    assert pool.k(0).isnan().all()


@pytest.mark.parametrize("name", CPU_BACKENDS)
def test_new_keys_and_values_lie_in_their_slots(name: str) -> None:
    pool = Pool(2)
    attention = build_attention(name, pool, NUM_LAYERS, torch.float32, 2)
    qkv = torch.randn(3, 6, HEAD_DIM)
    rope = ROTARY(torch.arange(3), torch.float32)
    keys, values = rotate(qkv[:, 2:4], *rope), qkv[:, 4:].clone()
    table = np.array([[5, 2]], dtype=np.int32)
    attention.prepare(
        Batch(np.array([3], np.int32), np.array([3], np.int32), table, torch.tensor([20, 21, 22]))
    )

    attention.forward(0, qkv, rope, None)

    assert torch.equal(pool.k(0)[5, :3], keys)
    assert torch.equal(pool.v(0)[5, :3], values)
    assert int(pool.k(0).isnan().logical_not().sum()) == keys.numel()


def test_an_unknown_backend_lists_the_valid_ones() -> None:
    with pytest.raises(ConfigurationError, match="'fa9' is unknown; valid are torch_native, flashinfer"):
        build_attention("fa9", Pool(1), NUM_LAYERS, torch.float32, 1)
