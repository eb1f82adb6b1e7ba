"""Every attention backend that runs on a CPU against attention written down plainly; which one is chosen.

Triton's runs in its interpreter. On a GPU: test_cuda_attention.py.
"""

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fixtures.kernels import HAS_GPU
from fixtures.paged_requests import Pool, Requests
from hypothesis import given, settings, strategies as st
from torch import Tensor

from ebbtide.srt import kernel_cache
from ebbtide.srt.errors import ConfigurationError, EngineError
from ebbtide.srt.layers.attention import base, decode_choice, flashinfer, flashinfer_latent
from ebbtide.srt.layers.attention.base import (
    AttentionBackend,
    AttentionShape,
    DecodeBuffers,
    LayerAttention,
)
from ebbtide.srt.layers.attention.decode_choice import is_uneven, serves_few, suits_few
from ebbtide.srt.layers.attention.registry import ATTENTION_BACKENDS, LATENT_BACKENDS, choose_backend
from ebbtide.srt.layers.heads import AttentionKind, HeadNorms, Pages
from ebbtide.srt.layers.rotary import RopeConfig, RotaryEmbedding, rotate
from ebbtide.srt.mem_cache import Latent
from ebbtide.srt.mem_cache.kv_scales import FP8, KVScales

NUM_LAYERS, PAGE_SIZE, HEAD_DIM, NUM_Q_HEADS = 2, 4, 8, 4
CPU, GPU = torch.device("cpu"), torch.device("cuda")
ROTARY = RotaryEmbedding(RopeConfig("default", 100.0), HEAD_DIM, CPU)
NORMS = HeadNorms(torch.linspace(0.5, 2.0, HEAD_DIM), torch.linspace(-1.0, 1.0, HEAD_DIM), 1e-5)
PLAIN = AttentionKind(HEAD_DIM**-0.5)
KINDS = [
    PLAIN,
    AttentionKind(0.7, window=5),
    AttentionKind(0.7, window=1),
    AttentionKind(0.4, soft_cap=1.5),
    AttentionKind(0.4, window=6, soft_cap=2.0),
]


# Kernels of Triton's, in its interpreter.
needs_interpreter = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or HAS_GPU, reason="needs Triton's interpreter"
)


def build(
    name: str,
    pool: Pool,
    kinds: list[AttentionKind],
    num_kv_heads: int,
    num_q_heads: int = NUM_Q_HEADS,
    sinks_N: Tensor | None = None,
) -> tuple[AttentionBackend, list[LayerAttention]]:
    layers = [LayerAttention(layer, kind, sinks_N) for layer, kind in enumerate(kinds)]
    used = tuple(dict.fromkeys(kinds))
    kv_dtype = pool.keys.dtype
    shape = AttentionShape(num_q_heads, num_kv_heads, HEAD_DIM, PAGE_SIZE, torch.float32, kv_dtype, used)
    return ATTENTION_BACKENDS[name](pool, layers, shape), layers


def normalise(x_TNH: Tensor, weight_H: Tensor, offset: float) -> Tensor:
    return F.rms_norm(x_TNH, weight_H.shape, weight_H + offset, NORMS.eps)


def plain_attention(
    kind: AttentionKind, q_TNH: Tensor, k_LKH: Tensor, v_LKH: Tensor, sinks_N: Tensor | None = None
) -> Tensor:
    """The last T of L positions attend to the window that ends with them; float64."""
    group = q_TNH.shape[1] // k_LKH.shape[1]
    out = torch.empty_like(q_TNH, dtype=torch.float64)
    for t, q_NH in enumerate(q_TNH.double()):
        end = len(k_LKH) - len(q_TNH) + t + 1
        seen = slice(0 if kind.window is None else max(0, end - kind.window), end)
        for head, q_H in enumerate(q_NH):
            k_LH, v_LH = k_LKH[seen, head // group].double(), v_LKH[seen, head // group].double()
            scores = k_LH @ q_H * kind.scale
            if kind.soft_cap is not None:
                scores = kind.soft_cap * torch.tanh(scores / kind.soft_cap)
            if sinks_N is not None:
                scores = torch.cat((scores, sinks_N[head : head + 1].double()))
            out[t, head] = scores.softmax(0)[: len(v_LH)] @ v_LH
    return out


def check_agreement(
    name: str,
    cached: list[int],
    steps: list[list[int]],
    num_kv_heads: int,
    norms: HeadNorms | None,
    kind: AttentionKind,
    seed: int,
    pool_options: Mapping[str, Any] | None = None,
    *,
    has_sinks: bool = False,
) -> None:
    """Requests with `cached` tokens that grow by `steps`: every output is that of plain attention.

    A pool with options gets numbers that every dtype and scale holds exactly, at angles of 0.
    """
    generator = torch.Generator().manual_seed(seed)
    requests = Requests(len(cached), 40, PAGE_SIZE, seed=seed)
    pool = Pool(NUM_LAYERS, requests.num_pages, PAGE_SIZE, num_kv_heads, HEAD_DIM, **(pool_options or {}))
    pool.groups = [0, 1]
    sinks_N = 3 * torch.randn(NUM_Q_HEADS, generator=generator) if has_sinks else None
    attention, layers = build(name, pool, [PLAIN, kind], num_kv_heads, sinks_N=sinks_N)
    keys, values = ([torch.empty(0, num_kv_heads, HEAD_DIM) for _ in cached] for _ in range(2))
    for num_new in [cached, *steps]:
        if not any(num_new):
            continue
        batch, positions = requests.grow(num_new)
        qkv = torch.randn(len(positions), NUM_Q_HEADS + 2 * num_kv_heads, HEAD_DIM, generator=generator)
        if pool_options is not None:
            qkv, positions = qkv.mul(4).round().clamp(-7, 7), torch.zeros_like(positions)
        q, k, v = torch.split(qkv, [NUM_Q_HEADS, num_kv_heads, num_kv_heads], dim=1)
        if norms is not None:
            q, k = normalise(q, norms.q_weight, norms.offset), normalise(k, norms.k_weight, norms.offset)
        rope = ROTARY(positions, torch.float32)
        q, k = rotate(q, *rope), rotate(k, *rope)
        step = attention.prepare(requests.with_other_group(batch))

        out = layers[1](qkv.clone(), rope, norms, step)
        first = 0
        for row, new in enumerate(num_new):
            part = slice(first, first + new)
            keys[row], values[row] = torch.cat((keys[row], k[part])), torch.cat((values[row], v[part]))
            expected = plain_attention(kind, q[part], keys[row], values[row], sinks_N)
            torch.testing.assert_close(out[part].double(), expected, rtol=1e-4, atol=1e-5)
            first = part.stop
    assert pool.k(0).float().isnan().all()


@settings(deadline=None, max_examples=60)
@given(
    # Per request: tokens that are cached before, and the new tokens of each step.
    shapes=st.lists(
        st.tuples(st.integers(0, 12), st.lists(st.integers(0, 8), min_size=3, max_size=3)),
        min_size=1,
        max_size=3,
    ),
    num_kv_heads=st.sampled_from([1, 2, 4]),
    norms=st.sampled_from([None, NORMS, replace(NORMS, offset=1.0)]),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 2**16),
    has_sinks=st.booleans(),
)
def test_torchs_own_agrees_with_plain_attention(
    shapes: list[tuple[int, list[int]]],
    num_kv_heads: int,
    norms: HeadNorms | None,
    kind: AttentionKind,
    seed: int,
    has_sinks: bool,
) -> None:
    steps = [list(step) for step in zip(*(steps for _, steps in shapes), strict=True)]
    cached = [cached for cached, _ in shapes]
    check_agreement("torch_native", cached, steps, num_kv_heads, norms, kind, seed, has_sinks=has_sinks)


@needs_interpreter
@pytest.mark.parametrize(("kind", "has_sinks"), [(PLAIN, False), (KINDS[-1], True)], ids=str)
def test_tritons_agrees_with_plain_attention(kind: AttentionKind, has_sinks: bool) -> None:
    # Prompts beside each other, a prompt in chunks beside decoding, and decoding alone.
    norms = replace(NORMS, offset=1.0) if kind.window is not None else None
    num_kv_heads = 2 if kind.soft_cap is None else 1
    steps = [[1, 5, 9], [1, 1, 1]]
    check_agreement("triton", [7, 3, 0], steps, num_kv_heads, norms, kind, seed=1, has_sinks=has_sinks)


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("torch_native", 1.0),
        ("torch_native", 4.0),
        pytest.param("triton", 4.0, marks=needs_interpreter),
    ],
)
def test_every_backend_agrees_over_keys_and_values_in_fp8(name: str, scale: float) -> None:
    scales = KVScales(torch.tensor([1.0, 0.5, 2.0, 0.25]).view(2, 2).expand(NUM_LAYERS, 2, 2) * scale)
    options = {"dtype": FP8, "scales": scales if scale != 1.0 else None}
    check_agreement(name, [7, 3, 0], [[1, 5, 9], [1, 1, 1]], 2, None, KINDS[-1], 1, options)


@needs_interpreter
@pytest.mark.parametrize("kind", [PLAIN, KINDS[-1]], ids=str)
# Few requests are divided among several programs.
@pytest.mark.parametrize("lens", [[5, 300], [1, 40, 7, 19, 33, 8, 30, 2, 31]])
def test_the_decode_kernel_for_fp8_agrees_with_plain_attention(kind: AttentionKind, lens: list[int]) -> None:
    """Over numbers of every exponent, whose bits it moves by itself. Pages read back are what they were."""
    from ebbtide.srt.layers.kernels.fp8.decode import attend_fp8, widen_pages

    requests = Requests(len(lens), 320, PAGE_SIZE)
    batch, _ = requests.grow(lens)
    shape = (requests.num_pages, PAGE_SIZE, 2, 16)
    v = (torch.randint(0, 127, shape) + 128 * torch.randint(0, 2, shape)).to(torch.uint8).view(FP8)
    k = (torch.randn(shape) * torch.tensor([2.0**-8, 1.0]).view(2, 1)).to(FP8)
    q = torch.randn(len(lens), 6, 16)
    out = torch.zeros_like(q)
    pages = batch.pages

    attend_fp8(q, k, v, pages, out, kind)

    wide = [torch.full((len(pages.kv_indices), *shape[1:]), float("nan")) for _ in range(2)]
    widen_pages(k, v, pages.kv_indices, *wide)
    for side, kept in zip((k, v), wide, strict=True):
        assert torch.equal(kept, side.float()[pages.kv_indices.long()])
    for row, (q_1NH, length) in enumerate(zip(q.half().split(1), lens, strict=True)):
        table = torch.from_numpy(requests.table[row]).long()
        keys, values = (side.float()[table].flatten(0, 1)[:length] for side in (k, v))
        expected = plain_attention(kind, q_1NH.float(), keys, values)[0]
        torch.testing.assert_close(out[row].double(), expected, rtol=4e-3, atol=0.1)


@needs_interpreter
@pytest.mark.parametrize(
    ("lens", "cut", "kind", "norm_offset", "has_sinks"),
    [
        ([1, 33, 210], (4, 64, 64), PLAIN, None, False),
        ([70, 64], (1, 64, 32), AttentionKind(0.2, soft_cap=2.0), 1.0, True),
        ([160, 5], (4, 64, 32), AttentionKind(0.2, window=90), 0.0, True),
    ],
    ids=str,
)
def test_few_requests_are_rotated_stored_and_attended_to_at_once(
    lens: list[int],
    cut: tuple[int, int, int],
    kind: AttentionKind,
    norm_offset: float | None,
    has_sinks: bool,
) -> None:
    """Several times: what counts the parts is left as it was. The last row is one that nobody asked for."""
    from ebbtide.srt.layers.kernels.few_decode import Cut, attend_few

    requests = Requests(len(lens), 256, PAGE_SIZE)
    requests.grow([length - 1 for length in lens])
    batch, positions = requests.grow([1] * len(lens))
    k_PSKH, v_PSKH = torch.randn(2, requests.num_pages, PAGE_SIZE, 2, 64)
    qkv, sinks = torch.randn(len(lens) + 1, 10, 64), 3 * torch.randn(6) if has_sinks else None
    norms = None if norm_offset is None else HeadNorms(*torch.randn(2, 64), NORMS.eps, norm_offset)
    rope = RotaryEmbedding(RopeConfig("default", 100.0), 64, CPU)(F.pad(positions, (0, 1)), torch.float32)
    used = batch.pages
    indptr, last = (
        F.pad(used.kv_indptr_R1, (0, 1), value=len(used.kv_indices)),
        F.pad(used.last_page_len_R, (0, 1)),
    )
    pages, slots = Pages(indptr, indptr, used.kv_indices, last), F.pad(batch.slots_T, (0, 1), value=-1)
    arrivals = torch.zeros(2 * len(slots), dtype=torch.int32)
    step = (slots, k_PSKH, v_PSKH, pages, arrivals)

    for _ in range(2):
        out = attend_few(qkv, rope, norms, *step, kind, sinks_N=sinks, cut=Cut(*cut))

    assert not arrivals.any()
    q, k, v = torch.split(qkv, [6, 2, 2], dim=1)
    if norms is not None:
        q, k = normalise(q, norms.q_weight, norms.offset), normalise(k, norms.k_weight, norms.offset)
    q, k = rotate(q, *rope), rotate(k, *rope)
    held = [side.flatten(0, 1) for side in (k_PSKH, v_PSKH)]
    torch.testing.assert_close(held[0][batch.slots_T], k[:-1])
    assert torch.equal(held[1][batch.slots_T], v[:-1])
    for row, length in enumerate(lens):
        table = torch.from_numpy(requests.table[row]).long()
        keys, values = (side[table].flatten(0, 1)[:length] for side in (k_PSKH, v_PSKH))
        expected = plain_attention(kind, q[row : row + 1], keys, values, sinks)[0]
        torch.testing.assert_close(out[row].double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("lens", "kinds", "suits"),
    [
        ([2048], (PLAIN,), True),
        ([16_384], (PLAIN,), False),
        ([640] * 8, (PLAIN,), True),
        ([1900] * 7 + [16_384], (PLAIN,), False),
        ([16_384] * 16, (PLAIN,), False),
        ([400] * 32, (PLAIN,), True),
        ([400] * 31 + [8192], (PLAIN, AttentionKind(0.1, window=384)), False),
        ([400] * 31 + [8192], (AttentionKind(0.1, window=384),), True),
        ([400] * 33, (PLAIN,), False),
    ],
)
def test_one_kernel_serves_few_requests_whose_parts_are_short(
    lens: list[int], kinds: tuple[AttentionKind, ...], suits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from ebbtide.srt.layers.kernels import few_decode

    monkeypatch.setattr(few_decode, "num_multiprocessors", lambda device: 132)
    shape = AttentionShape(32, 8, 128, 16, torch.bfloat16, torch.bfloat16, kinds)
    size, lens_R = len(lens), np.array(lens, dtype=np.int32)
    assert (serves_few(shape, size) and suits_few(shape, lens_R, size, CPU)) is suits


@pytest.mark.parametrize(
    ("lens", "kv_dtype", "num_kv_heads", "is_split"),
    [
        ([600] * 255 + [8000], torch.bfloat16, 8, True),
        ([600] * 256, torch.bfloat16, 8, False),
        ([600] * 255 + [2000], torch.bfloat16, 8, False),
        ([600] * 100 + [8000], torch.bfloat16, 8, False),  # few enough to be split anyway
        ([600] * 255 + [8000], FP8, 8, False),
        ([600] * 255 + [8000], torch.bfloat16, 32, False),  # another kernel's
    ],
)
def test_of_many_requests_the_longest_are_split_where_the_others_would_end_long_before(
    lens: list[int], kv_dtype: torch.dtype, num_kv_heads: int, is_split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_choice, "num_multiprocessors", lambda device: 132)
    shape = AttentionShape(32, num_kv_heads, 128, 16, torch.bfloat16, kv_dtype, (PLAIN,))
    assert is_uneven(shape, np.array(lens, dtype=np.int32), len(lens), CPU) is is_split


@pytest.mark.parametrize("inverse", [None, 64.0])
def test_fp8_holds_the_nearest_numbers_and_none_beyond_its_range(inverse: float | None) -> None:
    """Bit for bit, of ties the even one. Triton's interpreter rounds otherwise: see the GPU's tests."""
    requests = Requests(1, 8, PAGE_SIZE)
    scales = None if inverse is None else KVScales(torch.full((NUM_LAYERS, 2, 1), 1 / inverse))
    pool = Pool(NUM_LAYERS, requests.num_pages, PAGE_SIZE, 1, HEAD_DIM, dtype=FP8, scales=scales)
    attention, layers = build("torch_native", pool, [PLAIN], 1, num_q_heads=1)
    batch, positions = requests.grow([2])
    values = torch.tensor([1.0, 1.0625, 1.1875, -1e9, 1e9, 463.9, 2**-9 * 1.5, 2**-10, 0.3, -17.1, 448, 0.0,
                           float("nan"), 3e-3, 100.0, -240.0])  # fmt: skip
    qkv = torch.zeros(2, 3, HEAD_DIM)
    qkv[:, 2] = values.view(2, HEAD_DIM) / (inverse or 1.0)

    layers[0](qkv, ROTARY(positions, torch.float32), None, attention.prepare(batch))

    held = pool.v(0).flatten(0, 1)[batch.slots_T].flatten()
    expected = values.clamp(-448.0, 448.0).to(FP8)
    assert held.view(torch.uint8).tolist() == expected.view(torch.uint8).tolist()
    assert expected.float()[:3].tolist() == [1.0, 1.0, 1.25]


def test_a_plan_that_captured_kernels_do_not_fit_is_an_error() -> None:
    """They would read and write where the first plan said: an error, also under `python -O`."""
    plans = iter([[7, 1], [7, 1], [7, 2]])
    kernels: Any = SimpleNamespace(decode=SimpleNamespace(plan=lambda lens, captured: next(plans)))
    layers: Any = None
    empty = torch.zeros(3, dtype=torch.int32)
    buffers = DecodeBuffers(empty.long(), empty, empty, empty)
    step = flashinfer.GraphDecode(layers, {PLAIN: kernels}, SHAPE, 2, buffers)
    lens = np.arange(3, dtype=np.int32), np.ones(2, dtype=np.int32)
    step.plan(*lens)
    step.plan(*lens)

    with pytest.raises(EngineError, match="captured kernels do not fit"):
        step.plan(*lens)


SHAPE = AttentionShape(8, 2, 128, 16, torch.bfloat16, torch.bfloat16, (AttentionKind(0.1),))


@pytest.fixture
def gpu_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that the backends for GPUs need is installed."""
    for module in (flashinfer, flashinfer_latent):
        monkeypatch.setattr(module, "flashinfer_problem", lambda: None)
    monkeypatch.setattr(base, "compute_capability", lambda device: (9, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: object())


@pytest.mark.usefixtures("gpu_packages")
@pytest.mark.parametrize(
    ("changes", "chosen", "problem"),
    [
        ({}, "flashinfer", None),
        ({"kinds": (AttentionKind(0.1, window=9, soft_cap=50.0),)}, "flashinfer", None),
        ({"head_dim": 80}, "triton", "a head_dim of 64, 128 or 256, not 80"),
        ({"dtype": torch.float32}, "triton", "bfloat16 or float16, not float32"),
        ({"kv_dtype": torch.float16}, "triton", "the KV cache has dtype float16, the model bfloat16"),
        ({"kv_dtype": FP8}, "flashinfer", None),
        ({"kv_dtype": FP8, "head_dim": 64}, "triton", "FP8 with a head_dim of 128 or 256, not 64"),
        ({"head_dim": 512}, "torch_native", "up to 256, not 512"),
    ],
    ids=str,
)
def test_the_first_backend_that_serves_the_shape_is_chosen(
    changes: dict[str, Any], chosen: str, problem: str | None
) -> None:
    shape = replace(SHAPE, **changes)

    backend, problems = choose_backend(None, shape, GPU)

    assert backend is ATTENTION_BACKENDS[chosen]
    assert problem is None or problem in "; ".join(problems)
    if chosen != "flashinfer":
        with pytest.raises(ConfigurationError, match=r"attention_backend=flashinfer: .* not 80"):
            choose_backend("flashinfer", replace(SHAPE, head_dim=80), GPU)


@pytest.mark.usefixtures("gpu_packages")
def test_a_card_that_knows_no_fp8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "compute_capability", lambda device: (8, 0))

    with pytest.raises(ConfigurationError, match=r"FP8 needs a GPU of compute capability 8\.9 .* has 8\.0"):
        choose_backend(None, replace(SHAPE, kv_dtype=FP8), GPU)


@pytest.mark.usefixtures("gpu_packages")
@pytest.mark.parametrize(
    ("rank", "dtype", "chosen", "problem"),
    [
        (512, torch.bfloat16, LATENT_BACKENDS["flashinfer"], None),
        (256, torch.bfloat16, ATTENTION_BACKENDS["torch_native"], r"take latents of .*512.*, not .*256"),
        (512, torch.float32, ATTENTION_BACKENDS["torch_native"], "in the model's type, bfloat16 or float16"),
    ],
    ids=str,
)
def test_latents_have_a_backend_of_their_own(
    rank: int, dtype: torch.dtype, chosen: type[AttentionBackend], problem: str | None
) -> None:
    latent = Latent(rank, 64)
    shape = replace(SHAPE, num_kv_heads=1, head_dim=rank + 64, dtype=dtype, kv_dtype=dtype, latent=latent)

    backend, problems = choose_backend(None, shape, GPU)

    assert backend is chosen
    assert problem is None or re.search(problem, "; ".join(problems))
    with pytest.raises(ConfigurationError, match=r"attention_backend=triton: .* not latents"):
        choose_backend("triton", shape, GPU)
    with pytest.raises(ConfigurationError, match="latents are not kept in FP8: expected kv_cache_dtype"):
        choose_backend("torch_native", replace(shape, kv_dtype=FP8), GPU)
    for named in (None, "flashinfer"):
        with pytest.raises(ConfigurationError, match="latents are not kept in FP8: expected kv_cache_dtype"):
            choose_backend(named, replace(shape, kv_dtype=FP8), CPU)


def test_without_flashinfer_triton_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: package == "triton" or None)
    monkeypatch.setattr(flashinfer, "flashinfer_problem", kernel_cache.flashinfer_problem)

    backend, problems = choose_backend(None, SHAPE, GPU)

    assert backend is ATTENTION_BACKENDS["triton"]
    assert "FlashInfer is not installed" in problems[0]


@pytest.mark.parametrize("chosen", [None, *ATTENTION_BACKENDS])
def test_on_a_cpu_it_is_always_torchs_own_and_another_name_is_spoken_of(chosen: str | None) -> None:
    backend, problems = choose_backend(chosen, SHAPE, CPU)

    assert backend is ATTENTION_BACKENDS["torch_native"]
    assert [f"attention_backend={chosen}" in problem for problem in problems] == (
        [] if chosen in (None, "torch_native") else [True]
    )
    with pytest.raises(ConfigurationError, match="one of flashinfer, triton, torch_native, got 'abacus'"):
        choose_backend("abacus", SHAPE, CPU)
