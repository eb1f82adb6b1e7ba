"""The Triton kernels against the torch functions: in Triton's interpreter, and on a GPU if there is one.

Shapes: T tokens, N query heads, K KV heads, H head_dim, P pages, S page_size.
"""

import math
import os
from dataclasses import replace
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ebbtide.srt.layers.heads import HeadNorms, Pages, Rope
from ebbtide.srt.layers.norm import rms_norm
from ebbtide.srt.layers.rotary import RopeConfig, RotaryEmbedding, inverse_frequencies, rotate

HAS_GPU = torch.cuda.is_available()  # noqa: TID251
DEVICES = [
    pytest.param(
        "cpu", marks=pytest.mark.skipif(HAS_GPU, reason="the GPU runs these kernels"), id="interpreter"
    ),
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA GPU")]),
]
CPU = torch.device("cpu")
ROPE = RopeConfig("default", 500_000.0)
# (query heads, KV heads, head_dim): groups of 4, 7 and 1, and a head that is no power of two.
HEADS = [(8, 2, 64), (14, 2, 128), (3, 3, 96)]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
NUM_PAGES, PAGE_SIZE = 12, 16

pytestmark = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture(autouse=True)
def triton() -> ModuleType:
    """Triton, or its interpreter where there is no GPU."""
    if not HAS_GPU:
        # Triton reads this when it is imported, and transformers imports it.
        os.environ.setdefault("TRITON_INTERPRET", "1")
    language: ModuleType = pytest.importorskip("triton.language")
    if not HAS_GPU and type(language.sum).__name__ != "InterpretedFunction":
        pytest.skip("Triton was imported before TRITON_INTERPRET was set")
    return language


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("half", "scale"), [(32, 1.0), (48, 1.375)])
def test_angles_equal_those_of_torch(device: str, dtype: torch.dtype, half: int, scale: float) -> None:
    from ebbtide.srt.layers.kernels.rope import rope_angles

    positions = torch.tensor([0, 1, 17, 4095, 131_071])
    frequencies = inverse_frequencies(ROPE, 2 * half, CPU)
    expected = RotaryEmbedding(replace(ROPE, scale=scale), 2 * half, CPU)(positions, dtype)

    cos, sin = rope_angles(positions.to(device), frequencies.to(device), dtype, scale)

    assert (cos.dtype, cos.shape, sin.shape) == (dtype, expected.cos_T1H.shape, expected.sin_T1H.shape)
    # One unit in the last place: the interpreter rounds bfloat16 towards zero.
    step = math.ceil(scale) * {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    torch.testing.assert_close(cos.cpu(), expected.cos_T1H, rtol=0, atol=step)
    torch.testing.assert_close(sin.cpu(), expected.sin_T1H, rtol=0, atol=step)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("num_heads", "key_dim", "rank", "num_rotated"), [(4, 12, 32, 8), (5, 20, 40, 24)])
@pytest.mark.parametrize("is_interleaved", [False, True])
def test_heads_of_latent_attention_are_filled_as_by_torch(
    device: str,
    dtype: torch.dtype,
    num_heads: int,
    key_dim: int,
    rank: int,
    num_rotated: int,
    is_interleaved: bool,
) -> None:
    from ebbtide.srt.layers.kernels.latent import fill_heads

    torch.manual_seed(0)
    queries = torch.randn(3, num_heads, key_dim + num_rotated).to(dtype)
    # Behind a part of a projection that is another one's.
    latents = torch.randn(3, 7 + rank + num_rotated).to(dtype)[:, 7:]
    weight = torch.linspace(0.5, 1.5, rank).to(dtype)
    heads = torch.full((3, num_heads + 1, num_rotated + rank), torch.nan, dtype=dtype, device=device)

    of_latents = latents.to(device), weight.to(device), 1e-6
    fill_heads(queries.to(device), *of_latents, heads, is_interleaved=is_interleaved)

    def halves(x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) if is_interleaved else x

    filled = heads.cpu()
    assert torch.equal(filled[:, :-1, :num_rotated], halves(queries[..., key_dim:]))
    assert torch.equal(filled[:, -1, :num_rotated], halves(latents[:, rank:]))
    assert filled[:, :-1, num_rotated:].isnan().all()
    expected = rms_norm(latents[:, :rank].float(), weight.float(), 1e-6)
    tolerance = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(filled[:, -1, num_rotated:].float(), expected, **tolerance)


@pytest.mark.parametrize("num_tokens", [1, 3, 16])
@pytest.mark.parametrize(("num_inner", "num_columns"), [(24, 64), (64, 40)])
def test_latents_heads_are_multiplied_each_by_its_own_matrix(
    device: str, num_tokens: int, num_inner: int, num_columns: int
) -> None:
    from ebbtide.srt.layers.kernels.latent import multiply_heads

    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32  # the interpreter multiplies no other
    wide = torch.randn(num_tokens, 3, num_inner + 5, device=device).to(dtype)
    weight = torch.randn(3, num_columns, num_inner, device=device).to(dtype) / num_inner**0.5
    room = torch.full((num_tokens, 4, num_columns + 7), torch.nan, dtype=dtype, device=device)
    x, out = wide[..., 5:], room[:, :-1, 7:]

    multiply_heads(x, weight.transpose(1, 2), out)

    expected = torch.einsum("tnk,nmk->tnm", x.float(), weight.float())
    torch.testing.assert_close(out.float(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert room[:, -1].isnan().all()
    assert room[..., :7].isnan().all()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("num_heads", "rank", "num_rotated"), [(4, 32, 8), (5, 40, 24)])
def test_latents_are_rotated_and_stored_as_by_torch(
    device: str, dtype: torch.dtype, num_heads: int, rank: int, num_rotated: int
) -> None:
    from ebbtide.srt.layers.kernels.latent import rotate_and_store_latents

    torch.manual_seed(0)
    heads = torch.randn(7, num_heads + 1, num_rotated + rank).to(dtype)
    rope = RotaryEmbedding(ROPE, num_rotated, CPU)(torch.tensor([0, 1, 5, 90, 91, 92, 4000]), dtype)
    expected = rotate(heads, *rope)
    slots = torch.tensor([3, -1, 5, 130, 0, 17, 16])
    pool = torch.full((NUM_PAGES, PAGE_SIZE, 1, num_rotated + rank), torch.nan, dtype=dtype, device=device)

    on_device = Rope(*(x.to(device) for x in rope))
    queries = rotate_and_store_latents(heads.to(device), on_device, slots.to(device), pool)

    tolerance = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(queries.cpu(), expected[:, :-1], **tolerance)
    rows = pool.flatten(0, 2).cpu()
    kept = slots >= 0
    torch.testing.assert_close(rows[slots[kept]], expected[kept, -1], **tolerance)
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
    device: str,
    dtype: torch.dtype,
    heads: tuple[int, int, int],
    num_tokens: int,
    norm_offset: float | None,
    share: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ebbtide.srt.layers.kernels import rope as kernels
    from ebbtide.srt.layers.kernels.rope import rotate_and_store

    # Programs of one head, and of several.
    monkeypatch.setattr(kernels, "MANY_TOKENS", 5)
    torch.manual_seed(num_tokens)
    num_q, num_kv, head_dim = heads
    qkv = torch.randn(num_tokens, num_q + 2 * num_kv, head_dim).to(dtype)
    norms = None
    if norm_offset is not None:
        norms = HeadNorms(*torch.randn(2, head_dim).to(dtype), 1e-6, norm_offset)
    rotary = RotaryEmbedding(replace(ROPE, share=share), head_dim, CPU)
    rope = rotary(torch.randint(0, 5000, (num_tokens,)), dtype)
    slots = torch.randperm(NUM_PAGES * PAGE_SIZE)[:num_tokens]
    pages = torch.zeros(2, NUM_PAGES, PAGE_SIZE, num_kv, head_dim, dtype=dtype).to(device)

    q = rotate_and_store(
        qkv.to(device),
        Rope(rope.cos_T1H.to(device), rope.sin_T1H.to(device)),
        norms and replace(norms, q_weight=norms.q_weight.to(device), k_weight=norms.k_weight.to(device)),
        slots.to(device),
        *pages,
    )

    expected_q, expected_k, expected_v = expected_heads(qkv, rope, norms, num_kv)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(q.float().cpu(), expected_q, rtol=tolerance, atol=tolerance)
    expected_pages = torch.zeros(2, NUM_PAGES * PAGE_SIZE, num_kv, head_dim)
    expected_pages[0, slots], expected_pages[1, slots] = expected_k, expected_v
    stored = pages.flatten(1, 2).float().cpu()
    torch.testing.assert_close(stored[0], expected_pages[0], rtol=tolerance, atol=tolerance)
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


@pytest.mark.parametrize("num_tokens", [2, 64])
def test_a_token_without_a_slot_is_not_stored(device: str, num_tokens: int) -> None:
    from ebbtide.srt.layers.kernels.rope import rotate_and_store

    pages = torch.zeros(2, NUM_PAGES, PAGE_SIZE, 2, 64).to(device)
    slots = torch.full((num_tokens,), -1)
    slots[1] = NUM_PAGES * PAGE_SIZE - 1
    qkv = torch.rand(num_tokens, 8, 64) + 1
    rope = RotaryEmbedding(ROPE, 64, CPU)(torch.arange(num_tokens), torch.float32)

    rotate_and_store(
        qkv.to(device), Rope(*(part.to(device) for part in rope)), None, slots.to(device), *pages
    )

    written = pages.flatten(1, 2).cpu().abs().sum((0, 2, 3)).nonzero().flatten().tolist()
    assert written == [NUM_PAGES * PAGE_SIZE - 1]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("num_tokens", "inner"), [(1, 1536), (3, 40), (20, 1024)])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_the_activation_equals_that_of_torch(
    device: str, dtype: torch.dtype, num_tokens: int, inner: int, activation: str
) -> None:
    from ebbtide.srt.layers.kernels.norm import gated

    torch.manual_seed(0)
    gate_up = torch.randn(num_tokens, 2 * inner).to(dtype) * 4

    out = gated(gate_up.to(device), activation)

    gate, up = gate_up.float().chunk(2, dim=-1)
    assert out.dtype == dtype
    active = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    torch.testing.assert_close(out.float().cpu(), active * up, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("shape", "offset"), [((3, 2304), 1.0), ((1, 4, 40), 1.0), ((5, 96), 0.0)], ids=str)
def test_a_norm_equals_that_of_torch(
    device: str, dtype: torch.dtype, shape: tuple[int, ...], offset: float
) -> None:
    from ebbtide.srt.layers.kernels.norm import rms_norm_at_once

    torch.manual_seed(0)
    x, weight = torch.randn(shape).to(dtype), 0.1 * torch.randn(shape[-1]).to(dtype)

    out = rms_norm_at_once(x.to(device), weight.to(device), 1e-6, offset)

    assert (out.dtype, out.shape) == (dtype, x.shape)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out.cpu(), rms_norm(x, weight, 1e-6, offset), rtol=tolerance, atol=tolerance)
    # A part of wider rows.
    wide = torch.cat((x, x), -1).to(device)[..., shape[-1] :]
    assert torch.equal(rms_norm_at_once(wide, weight.to(device), 1e-6, offset), out)


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_parts_of_rows_are_put_together_and_sinks_counted(device: str, heads: tuple[int, int, int]) -> None:
    from ebbtide.srt.layers.kernels.merge_parts import count_sinks_, merge_parts

    num_heads, _, head_dim = heads
    parts = torch.randn(4, 5, num_heads, head_dim)
    sums = 10 * torch.randn(4, 5, num_heads)
    num_parts = torch.tensor([1, 4, 2, 3, 1], dtype=torch.int32)
    expected = torch.stack(
        [
            (torch.softmax(sums[:count, row] * math.log(2), 0)[..., None] * parts[:count, row]).sum(0)
            for row, count in enumerate(num_parts.tolist())
        ]
    )
    for row, count in enumerate(num_parts.tolist()):
        parts[count:, row] = sums[count:, row] = math.nan
    out = torch.empty(5, num_heads, head_dim, device=device)
    merged_sums = torch.empty(5, num_heads, device=device)

    merge_parts(parts.to(device), sums.to(device), num_parts.to(device), out, merged_sums)

    torch.testing.assert_close(out.cpu(), expected, rtol=1e-5, atol=1e-5)
    totals = torch.stack(
        [(sums[:count, row] * math.log(2)).logsumexp(0) for row, count in enumerate(num_parts.tolist())]
    )
    torch.testing.assert_close(merged_sums.cpu() * math.log(2), totals, rtol=1e-5, atol=1e-5)

    sinks = 10 * torch.randn(num_heads)
    count_sinks_(out, merged_sums, sinks.to(device))

    shares = totals.exp() / (totals.exp() + sinks.exp())
    torch.testing.assert_close(out.cpu(), expected * shares[..., None], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("lens", "cut", "window", "soft_cap", "norm_offset", "has_sinks"),
    [
        ([1, 33, 210], (4, 64, 64), None, None, None, False),
        ([70, 64], (1, 64, 32), None, 2.0, 1.0, True),
        ([160, 5], (4, 64, 32), 90, None, 0.0, True),
    ],
)
def test_few_requests_are_rotated_stored_and_attended_to_at_once(
    device: str,
    lens: list[int],
    cut: tuple[int, int, int],
    window: int | None,
    soft_cap: float | None,
    norm_offset: float | None,
    has_sinks: bool,
) -> None:
    """Several times: what counts the parts is left as it was. The last row is one that nobody asked for."""
    from ebbtide.srt.layers.kernels.few_decode import Cut, attend_few

    torch.manual_seed(len(lens))
    dtype = torch.bfloat16 if HAS_GPU else torch.float32
    num_q, num_kv, head_dim = 6, 2, 64
    count = len(lens)
    qkv = torch.randn(count + 1, num_q + 2 * num_kv, head_dim).to(dtype)
    sinks = 3 * torch.randn(num_q) if has_sinks else None
    norms = None
    if norm_offset is not None:
        norms = HeadNorms(*torch.randn(2, head_dim).to(dtype), 1e-6, norm_offset)
    rope = RotaryEmbedding(ROPE, head_dim, CPU)(torch.tensor([*lens, 1]) - 1, dtype)
    used = [-(-length // PAGE_SIZE) for length in lens]
    tables = torch.randperm(sum(used)).int().split(used)
    places = [(table.long()[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)).flatten() for table in tables]
    slots = torch.tensor([int(place[length - 1]) for place, length in zip(places, lens, strict=True)] + [-1])
    k, v = torch.randn(2, sum(used), PAGE_SIZE, num_kv, head_dim).to(device, dtype)
    last = torch.tensor([(length - 1) % PAGE_SIZE + 1 for length in lens] + [0], dtype=torch.int32)
    indptr = torch.tensor([0, *used, 0], dtype=torch.int32).cumsum(0).int()
    indices = torch.cat(tables).to(device)
    pages = Pages(indptr.to(device), indptr.to(device), indices, last.to(device), most_new=1)
    arrivals = torch.zeros((count + 1) * num_kv, dtype=torch.int32, device=device)
    on_device = norms and replace(
        norms, q_weight=norms.q_weight.to(device), k_weight=norms.k_weight.to(device)
    )

    for _ in range(2):
        out = attend_few(
            qkv.to(device),
            Rope(rope.cos_T1H.to(device), rope.sin_T1H.to(device)),
            on_device,
            slots.to(device),
            k,
            v,
            pages,
            arrivals,
            scale=0.2,
            window=window,
            soft_cap=soft_cap,
            sinks_N=None if sinks is None else sinks.to(device),
            cut=Cut(*cut),
        )

    assert not arrivals.any()
    q_TNH, k_TKH, v_TKH = expected_heads(qkv, rope, norms, num_kv)
    keys, values = (side.flatten(0, 1).float().cpu() for side in (k, v))
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(keys[slots[:-1]], k_TKH[:-1], rtol=tolerance, atol=tolerance)
    assert torch.equal(values[slots[:-1]], v_TKH[:-1])
    for row, (place, length) in enumerate(zip(places, lens, strict=True)):
        seen = place[max(0, length - (window or length)) : length]
        heads = (side[seen].repeat_interleave(num_q // num_kv, 1) for side in (keys, values))
        score, value = torch.einsum("nh,lnh->nl", q_TNH[row], next(heads)) * 0.2, next(heads)
        if soft_cap is not None:
            score = soft_cap * torch.tanh(score / soft_cap)
        if sinks is not None:
            score = torch.cat((score, sinks[:, None]), 1)
        expected = torch.einsum("nl,lnh->nh", score.softmax(-1)[:, : len(value)], value)
        torch.testing.assert_close(out[row].float().cpu(), expected, rtol=tolerance, atol=tolerance)
