"""The Triton kernels against the torch functions.

Shapes: T tokens, N query heads, K KV heads, H head_dim, P pages, S page_size.
"""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from fixtures.kernels import DEVICE, ON_BOTH, TOLERANCE
from torch import Tensor

from ebbtide.srt.layers.heads import HeadNorms, Rope
from ebbtide.srt.layers.norm import rms_norm
from ebbtide.srt.layers.rotary import RopeConfig, RotaryEmbedding, inverse_frequencies, rotate

pytest.importorskip("triton")
from ebbtide.srt.layers.kernels import rope as rope_kernels
from ebbtide.srt.layers.kernels.latent import fill_heads, rotate_and_store_latents
from ebbtide.srt.layers.kernels.merge_parts import count_sinks_, merge_parts
from ebbtide.srt.layers.kernels.norm import gated, rms_norm_at_once
from ebbtide.srt.layers.kernels.rope import rope_angles, rotate_and_store

CPU = torch.device("cpu")
ROPE = RopeConfig("default", 500_000.0)
# (query heads, KV heads, head_dim): groups of 4, 7 and 1, and a head that is no power of two.
HEADS = [(8, 2, 64), (14, 2, 128), (3, 3, 96)]
NUM_PAGES, PAGE_SIZE = 12, 16

pytestmark = ON_BOTH


def near(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}


def sent(x: Rope) -> Rope:
    return Rope(*(part.to(DEVICE) for part in x))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("half", "scale"), [(32, 1.0), (48, 1.375)])
def test_angles_equal_those_of_torch(dtype: torch.dtype, half: int, scale: float) -> None:
    positions = torch.tensor([0, 1, 17, 4095, 131_071])
    frequencies = inverse_frequencies(ROPE, 2 * half, CPU)
    expected = RotaryEmbedding(replace(ROPE, scale=scale), 2 * half, CPU)(positions, dtype)

    cos, sin = rope_angles(positions.to(DEVICE), frequencies.to(DEVICE), dtype, scale)

    assert (cos.dtype, cos.shape, sin.shape) == (dtype, expected.cos_T1H.shape, expected.sin_T1H.shape)
    # One unit in the last place: the interpreter rounds bfloat16 towards zero.
    step = math.ceil(scale) * {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    torch.testing.assert_close(cos.cpu(), expected.cos_T1H, rtol=0, atol=step)
    torch.testing.assert_close(sin.cpu(), expected.sin_T1H, rtol=0, atol=step)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("num_heads", "key_dim", "rank", "num_rotated"), [(4, 12, 32, 8), (5, 20, 40, 24)])
@pytest.mark.parametrize("is_interleaved", [False, True])
def test_heads_of_latent_attention_are_filled_as_by_torch(
    dtype: torch.dtype,
    num_heads: int,
    key_dim: int,
    rank: int,
    num_rotated: int,
    is_interleaved: bool,
) -> None:
    torch.manual_seed(0)
    queries = torch.randn(3, num_heads, key_dim + num_rotated).to(dtype)
    # Behind a part of a projection that is another one's.
    latents = torch.randn(3, 7 + rank + num_rotated).to(dtype)[:, 7:]
    weight = torch.linspace(0.5, 1.5, rank).to(dtype)
    heads = torch.full((3, num_heads + 1, num_rotated + rank), torch.nan, dtype=dtype, device=DEVICE)

    of_latents = latents.to(DEVICE), weight.to(DEVICE), 1e-6
    fill_heads(queries.to(DEVICE), *of_latents, heads, is_interleaved=is_interleaved)

    def halves(x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) if is_interleaved else x

    filled = heads.cpu()
    assert torch.equal(filled[:, :-1, :num_rotated], halves(queries[..., key_dim:]))
    assert torch.equal(filled[:, -1, :num_rotated], halves(latents[:, rank:]))
    assert filled[:, :-1, num_rotated:].isnan().all()
    expected = rms_norm(latents[:, :rank].float(), weight.float(), 1e-6)
    torch.testing.assert_close(filled[:, -1, num_rotated:].float(), expected, **near(dtype))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("num_heads", "rank", "num_rotated"), [(4, 32, 8), (5, 40, 24)])
def test_latents_are_rotated_and_stored_as_by_torch(
    dtype: torch.dtype, num_heads: int, rank: int, num_rotated: int
) -> None:
    torch.manual_seed(0)
    heads = torch.randn(7, num_heads + 1, num_rotated + rank).to(dtype)
    rope = RotaryEmbedding(ROPE, num_rotated, CPU)(torch.tensor([0, 1, 5, 90, 91, 92, 4000]), dtype)
    expected = rotate(heads, *rope)
    slots = torch.tensor([3, -1, 5, 130, 0, 17, 16])
    pool = torch.full((NUM_PAGES, PAGE_SIZE, 1, num_rotated + rank), torch.nan, dtype=dtype, device=DEVICE)

    queries = rotate_and_store_latents(heads.to(DEVICE), sent(rope), slots.to(DEVICE), pool)

    torch.testing.assert_close(queries.cpu(), expected[:, :-1], **near(dtype))
    rows = pool.flatten(0, 2).cpu()
    kept = slots >= 0
    torch.testing.assert_close(rows[slots[kept]], expected[kept, -1], **near(dtype))
    assert rows.isnan().all(1).sum() == NUM_PAGES * PAGE_SIZE - kept.sum()


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize(
    ("dtype", "num_tokens", "norm_offset", "share"),
    [
        (torch.float32, 1, 0.0, 1.0),
        (torch.float32, 5, None, 1.0),
        (torch.float32, 1, None, 0.5),
        (torch.float32, 5, 1.0, 0.25),
        (torch.bfloat16, 5, 0.0, 1.0),
        (torch.bfloat16, 5, 1.0, 1.0),
    ],
    ids=str,
)
def test_queries_are_rotated_and_keys_and_values_stored(
    dtype: torch.dtype,
    heads: tuple[int, int, int],
    num_tokens: int,
    norm_offset: float | None,
    share: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Programs of one head, and of several.
    monkeypatch.setattr(rope_kernels, "MANY_TOKENS", 5)
    torch.manual_seed(num_tokens)
    num_q, num_kv, head_dim = heads
    qkv = torch.randn(num_tokens, num_q + 2 * num_kv, head_dim).to(dtype)
    norms = on_device = None
    if norm_offset is not None:
        norms = HeadNorms(*torch.randn(2, head_dim).to(dtype), 1e-6, norm_offset)
        on_device = HeadNorms(norms.q_weight.to(DEVICE), norms.k_weight.to(DEVICE), norms.eps, norm_offset)
    rotary = RotaryEmbedding(replace(ROPE, share=share), head_dim, CPU)
    rope = rotary(torch.randint(0, 5000, (num_tokens,)), dtype)
    slots = torch.randperm(NUM_PAGES * PAGE_SIZE)[:num_tokens]
    slots[2:3] = -1  # not stored
    pages = torch.zeros(2, NUM_PAGES, PAGE_SIZE, num_kv, head_dim, dtype=dtype).to(DEVICE)

    q = rotate_and_store(qkv.to(DEVICE), sent(rope), on_device, slots.to(DEVICE), *pages)

    expected_q, expected_k, expected_v = expected_heads(qkv, rope, norms, num_kv)
    torch.testing.assert_close(q.float().cpu(), expected_q, **near(dtype))
    expected_pages = torch.zeros(2, NUM_PAGES * PAGE_SIZE, num_kv, head_dim)
    kept = slots >= 0
    expected_pages[0, slots[kept]], expected_pages[1, slots[kept]] = expected_k[kept], expected_v[kept]
    stored = pages.flatten(1, 2).float().cpu()
    torch.testing.assert_close(stored[0], expected_pages[0], **near(dtype))
    assert torch.equal(stored[1], expected_pages[1])


def expected_heads(
    qkv: Tensor, rope: Rope, norms: HeadNorms | None, num_kv: int
) -> tuple[Tensor, Tensor, Tensor]:
    """In float32 from the rounded inputs."""
    q, k, v = torch.split(qkv.float(), [qkv.shape[1] - 2 * num_kv, num_kv, num_kv], dim=1)
    if norms is not None:
        q = rms_norm(q, norms.q_weight.float() + norms.offset, norms.eps)
        k = rms_norm(k, norms.k_weight.float() + norms.offset, norms.eps)
    wide = Rope(rope.cos_T1H.float(), rope.sin_T1H.float())
    return rotate(q, *wide), rotate(k, *wide), v


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("num_tokens", "inner"), [(1, 1536), (3, 40), (20, 1024)])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_the_activation_equals_that_of_torch(
    dtype: torch.dtype, num_tokens: int, inner: int, activation: str
) -> None:
    torch.manual_seed(0)
    gate_up = torch.randn(num_tokens, 2 * inner).to(dtype) * 4

    out = gated(gate_up.to(DEVICE), activation)

    gate, up = gate_up.float().chunk(2, dim=-1)
    assert out.dtype == dtype
    active = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    torch.testing.assert_close(out.float().cpu(), active * up, **near(dtype))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("shape", "offset"), [((3, 2304), 1.0), ((1, 4, 40), 1.0), ((5, 96), 0.0)], ids=str)
def test_a_norm_equals_that_of_torch(dtype: torch.dtype, shape: tuple[int, ...], offset: float) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(shape).to(dtype), 0.1 * torch.randn(shape[-1]).to(dtype)

    out = rms_norm_at_once(x.to(DEVICE), weight.to(DEVICE), 1e-6, offset)

    assert (out.dtype, out.shape) == (dtype, x.shape)
    torch.testing.assert_close(out.cpu(), rms_norm(x, weight, 1e-6, offset), **near(dtype))
    # A part of wider rows.
    wide = torch.cat((x, x), -1).to(DEVICE)[..., shape[-1] :]
    assert torch.equal(rms_norm_at_once(wide, weight.to(DEVICE), 1e-6, offset), out)


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_parts_of_rows_are_put_together_and_sinks_counted(heads: tuple[int, int, int]) -> None:
    num_heads, _, head_dim = heads
    parts = torch.randn(4, 5, num_heads, head_dim)
    sums = 10 * torch.randn(4, 5, num_heads)
    num_parts = torch.tensor([1, 4, 2, 3, 1], dtype=torch.int32)
    weights = [(sums[:count, row] * math.log(2)) for row, count in enumerate(num_parts.tolist())]
    expected = torch.stack(
        [
            (weight.softmax(0)[..., None] * parts[: len(weight), row]).sum(0)
            for row, weight in enumerate(weights)
        ]
    )
    for row, count in enumerate(num_parts.tolist()):
        parts[count:, row] = sums[count:, row] = math.nan
    out = torch.empty(5, num_heads, head_dim, device=DEVICE)
    merged_sums = torch.empty(5, num_heads, device=DEVICE)

    merge_parts(parts.to(DEVICE), sums.to(DEVICE), num_parts.to(DEVICE), out, merged_sums)

    torch.testing.assert_close(out.cpu(), expected, rtol=1e-5, atol=1e-5)
    totals = torch.stack([weight.logsumexp(0) for weight in weights])
    torch.testing.assert_close(merged_sums.cpu() * math.log(2), totals, rtol=1e-5, atol=1e-5)

    sinks = 10 * torch.randn(num_heads)
    count_sinks_(out, merged_sums, sinks.to(DEVICE))

    shares = totals.exp() / (totals.exp() + sinks.exp())
    torch.testing.assert_close(out.cpu(), expected * shares[..., None], rtol=1e-4, atol=1e-5)
