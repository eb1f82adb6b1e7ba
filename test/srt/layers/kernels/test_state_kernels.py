"""The kernels of layers with states against torch."""

import pytest
import torch
from fixtures.kernels import DEVICE, HAS_GPU, ON_BOTH
from torch import Tensor

from ebbtide.srt.layers import state as reference
from ebbtide.srt.layers.state import PIECE_TOKENS, StateStep

pytest.importorskip("triton")
from ebbtide.srt.layers.kernels import convolution, gated_delta, mamba2

# The interpreter multiplies no matrices of bfloat16.
DTYPES = [torch.float32, torch.bfloat16 if HAS_GPU else torch.float16]
SIZE = 4
# (key heads, value heads, head_dim of keys, of values)
HEADS = [(2, 4, 16, 24), (1, 2, 32, 64)]
# (heads, groups, head_dim, numbers of a state for each of a head) of Mamba-2
SCANS = [(4, 2, 24, 16), (2, 1, 64, 128)]
# Tokens before the pass and in it: those with one come first.
BATCHES = {
    "decode": [(5, 1), (0, 1), (70, 1)],
    "prompts": [(0, 2), (0, 130), (3, 64), (9, 1), (40, 65)],
    "both": [(8, 1), (0, 1), (0, 90), (1, 3)],
}

pytestmark = ON_BOTH


@pytest.fixture(params=BATCHES)
def batch(request: pytest.FixtureRequest) -> "Batch":
    return Batch(request.param)


class Batch:
    """Requests in shuffled slots of a pool; slots of requests without tokens hold anything."""

    def __init__(self, name: str) -> None:
        self.generator = torch.Generator().manual_seed(0)
        lens = [count for _, count in BATCHES[name]]
        num_decoding = next((index for index, count in enumerate(lens) if count > 1), len(lens))
        firsts = [sum(lens[:index]) for index in range(len(lens) + 1)]
        self.num_slots, self.num_tokens = len(lens) + 3, firsts[-1]
        self.slots = torch.randperm(self.num_slots, generator=self.generator)[: len(lens)]
        positions = [start + index for start, count in BATCHES[name] for index in range(count)]
        self.positions = torch.tensor(positions, device=DEVICE)
        pieces = [
            (firsts[number] + start, min(PIECE_TOKENS, lens[number] - start), number)
            for number in range(num_decoding, len(lens))
            for start in range(0, lens[number], PIECE_TOKENS)
        ]
        indptr = torch.tensor(firsts[num_decoding:], dtype=torch.int32, device=DEVICE)
        table = torch.tensor(pieces, dtype=torch.int32, device=DEVICE) if pieces else None
        self.step = StateStep([], self.slots.to(DEVICE), num_decoding, indptr, lens[num_decoding:], table)

    def random(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(DEVICE, dtype)


def assert_close(ours: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    atol = 2e-5 if dtype == torch.float32 else 3e-2 * max(1.0, float(expected.float().abs().max()))
    torch.testing.assert_close(ours.float(), expected.float(), atol=atol, rtol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_convolution(batch: "Batch", dtype: torch.dtype) -> None:
    """With a bias in float32, and without one."""
    channels = 80
    # A part of a wider projection.
    inputs = batch.random(batch.num_tokens, channels + 16, dtype=dtype)[:, :channels]
    weight, held = (
        batch.random(channels, 1, SIZE, dtype=dtype),
        batch.random(batch.num_slots, channels, SIZE - 1),
    )
    held = held.to(dtype)
    bias = batch.random(channels) if dtype == torch.float32 else None
    expected_held = held.clone()
    expected = reference.convolve(inputs, weight, expected_held, batch.positions, batch.step, bias)

    ours = convolution.convolve(inputs, weight, held, batch.positions, batch.step, bias)

    assert_close(ours, expected, dtype)
    assert torch.equal(held, expected_held)


@pytest.mark.parametrize(("heads", "dtype"), list(zip(HEADS, DTYPES, strict=True)), ids=str)
def test_delta_rule(batch: "Batch", heads: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    num_k, num_v, k_dim, v_dim = heads
    qkv = batch.random(batch.num_tokens, 2 * num_k * k_dim + num_v * v_dim, dtype=dtype)
    # Repeated keys are the hard case: each update takes back the one before.
    qkv[batch.num_tokens // 2 :, : 2 * num_k * k_dim] = qkv[0, : 2 * num_k * k_dim]
    both = batch.random(batch.num_tokens, 2 * num_v, dtype=dtype)
    rates, decays = torch.split(both, num_v, dim=1)
    decay_log, bias = batch.random(num_v) - 1.0, batch.random(num_v)
    matrices = batch.random(batch.num_slots, num_v, k_dim, v_dim)
    expected_matrices = matrices.clone()
    arguments = (qkv, rates, decays, decay_log, bias)
    expected = reference.delta_rule(*arguments, expected_matrices, batch.positions, batch.step)

    ours = gated_delta.delta_rule(*arguments, matrices, batch.positions, batch.step)

    assert_close(ours, expected, dtype)
    assert_close(matrices, expected_matrices, dtype)
    others = [slot for slot in range(batch.num_slots) if slot not in batch.slots.tolist()]
    assert torch.equal(matrices[others], expected_matrices[others])


def test_norm(batch: "Batch") -> None:
    heads, weight = batch.random(batch.num_tokens, 3, 24), batch.random(24)
    gates = torch.unflatten(batch.random(batch.num_tokens, 100)[:, 28:], 1, (3, 24))

    ours = gated_delta.gated_norm(heads, gates, weight, 1e-6)

    assert_close(ours, reference.gated_norm(heads, gates, weight, 1e-6), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SCANS, ids=str)
def test_selective_scan(batch: "Batch", sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    num_heads, num_groups, head_dim, state_size = sizes
    inner, vectors = num_heads * head_dim, num_groups * state_size
    xbc = batch.random(batch.num_tokens, inner + 2 * vectors, dtype=dtype)
    xbc[:, inner:] /= state_size**0.25
    # A part of a wider projection; some heads forget little, some all.
    steps = batch.random(batch.num_tokens, num_heads + 3, dtype=dtype)[:, 3:]
    decay_log, bias, skip = (batch.random(num_heads) + shift for shift in (-2.0, -1.0, 0.0))
    decay_log[0] = 3.0
    matrices = batch.random(batch.num_slots, num_heads, head_dim, state_size)
    expected_matrices = matrices.clone()
    arguments = (xbc, steps, decay_log, bias, skip)
    expected = reference.selective_scan(*arguments, expected_matrices, batch.positions, batch.step)

    ours = mamba2.selective_scan(*arguments, matrices, batch.positions, batch.step)

    assert_close(ours, expected, dtype)
    assert_close(matrices, expected_matrices, dtype)
    others = [slot for slot in range(batch.num_slots) if slot not in batch.slots.tolist()]
    assert torch.equal(matrices[others], expected_matrices[others])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_of_groups_behind_the_gate(batch: "Batch", dtype: torch.dtype) -> None:
    num_tokens = min(9, batch.num_tokens)
    x, weight = batch.random(num_tokens, 72, dtype=dtype), batch.random(72, dtype=dtype)
    gates = batch.random(num_tokens, 100, dtype=dtype)[:, :72]

    ours = mamba2.gated_group_norm(x, gates, weight, 3, 1e-5)

    assert_close(ours, reference.gated_group_norm(x, gates, weight, 3, 1e-5), dtype)
