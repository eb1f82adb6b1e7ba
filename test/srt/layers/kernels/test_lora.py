"""The kernels of adapters against the plain products, in the interpreter where there is no GPU."""

from types import ModuleType
from typing import Any

import pytest
import torch

from ebbtide.srt.layers.lora import ProductAdapters, StepAdapters
from ebbtide.srt.layers.moe import AdaptedExperts, MoeConfig, run_experts
from ebbtide.srt.layers.norm import Activation, gated

HAS_GPU = torch.cuda.is_available()  # noqa: TID251
DEVICES = [
    pytest.param(
        "cpu", marks=pytest.mark.skipif(HAS_GPU, reason="the GPU runs these kernels"), id="interpreter"
    ),
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA GPU")]),
]
# The interpreter multiplies no bfloat16 matrices.
DTYPES = [torch.float32, torch.bfloat16] if HAS_GPU else [torch.float32]
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
NUM_SLOTS = 3

pytestmark = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture(autouse=True)
def lora() -> ModuleType:
    """The kernels, interpreted where there is no GPU."""
    pytest.importorskip("triton")
    from ebbtide.srt.layers.kernels import lora

    return lora


def make_adapters(
    device: str,
    num_columns: int,
    ends: tuple[int, ...],
    rank: int,
    num_experts: int = 1,
    dtype: torch.dtype = torch.float32,
) -> ProductAdapters:
    torch.manual_seed(0)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype, device=device) / 8

    a_SEPD = values(NUM_SLOTS, num_experts, len(ends) * rank, num_columns)
    # Slots have other things between them.
    b_SEOR = values(NUM_SLOTS, 2, num_experts, ends[-1], rank)[:, 0]
    scalings_SP = torch.rand(NUM_SLOTS, 5, device=device)[:, 1 : 1 + len(ends)]
    return ProductAdapters(a_SEPD, b_SEOR, scalings_SP, ends)


def add(
    lora: ModuleType,
    adapters: ProductAdapters,
    groups: Any,
    x_TD: torch.Tensor,
    out_NO: torch.Tensor,
    top_k: int = 1,
    weights_N: torch.Tensor | None = None,
) -> None:
    inner = lora.shrink(x_TD, adapters.factors, groups, top_k=top_k)
    lora.expand(inner, adapters.factors, groups, out_NO, weights_N=weights_N)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 7, 40])
@pytest.mark.parametrize(
    ("num_columns", "ends", "rank"), [(96, (64, 96, 128), 16), (160, (48,), 48), (1088, (40, 80), 80)]
)
def test_products_of_any_mix_of_adapters(
    device: str,
    lora: ModuleType,
    dtype: torch.dtype,
    num_tokens: int,
    num_columns: int,
    ends: tuple[int, ...],
    rank: int,
) -> None:
    adapters = make_adapters(device, num_columns, ends, rank, dtype=dtype)
    x_TD = torch.randn(num_tokens, num_columns, device=device, dtype=dtype)
    out_TO = torch.randn(num_tokens, ends[-1], device=device, dtype=dtype)
    slots_T = torch.arange(num_tokens, dtype=torch.int32, device=device) * 7 % (NUM_SLOTS + 1) - 1
    expected_TO = out_TO.clone()
    adapters.add_rows_(expected_TO, x_TD, slots_T, 0)
    groups = lora.list_groups(slots_T, NUM_SLOTS)
    add(lora, adapters, groups, x_TD, out_TO)
    torch.testing.assert_close(out_TO, expected_TO, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert torch.equal(out_TO[slots_T < 0], expected_TO[slots_T < 0])


@pytest.mark.parametrize("ends", [(40, 80), (80,)])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_products_of_any_mix_of_adapters(
    device: str, lora: ModuleType, ends: tuple[int, ...], activation: Activation
) -> None:
    adapters = make_adapters(device, 96, ends, 80)
    x_TD = torch.randn(19, 96, device=device)
    gate_up_T2I = torch.randn(19, 80, device=device)
    slots_T = torch.arange(19, dtype=torch.int32, device=device) * 7 % (NUM_SLOTS + 1) - 1
    expected_T2I = gate_up_T2I.clone()
    adapters.add_rows_(expected_T2I, x_TD, slots_T, 0)
    groups = lora.list_groups(slots_T, NUM_SLOTS)
    inner = lora.shrink(x_TD, adapters.factors, groups)
    found_TI = lora.expand_gated(inner, adapters.factors, groups, gate_up_T2I, activation)
    torch.testing.assert_close(found_TI, gated(expected_T2I, activation), atol=1e-4, rtol=1e-4)


def test_tokens_of_a_long_prompt_share_blocks(device: str, lora: ModuleType) -> None:
    adapters = make_adapters(device, 64, (32,), 16)
    num_tokens = lora.FEW_ROWS + 100
    x_TD = torch.randn(num_tokens, 64, device=device)
    slots_T = torch.arange(num_tokens, dtype=torch.int32, device=device) % (NUM_SLOTS + 1) - 1
    out_TO = torch.zeros(num_tokens, 32, device=device)
    expected_TO = out_TO.clone()
    adapters.add_rows_(expected_TO, x_TD, slots_T, 0)
    groups = lora.list_groups(slots_T, NUM_SLOTS)
    assert groups.block_rows == lora.LARGE_BLOCK
    add(lora, adapters, groups, x_TD, out_TO)
    torch.testing.assert_close(out_TO, expected_TO, atol=1e-4, rtol=1e-4)


def test_no_token_has_an_adapter(device: str, lora: ModuleType) -> None:
    adapters = make_adapters(device, 64, (32,), 16)
    out_TO = torch.ones(2, 32, device=device)
    groups = lora.list_groups(torch.full((2,), -1, dtype=torch.int32, device=device), NUM_SLOTS)
    x_TD = torch.randn(2, 64, device=device)
    add(lora, adapters, groups, x_TD, out_TO)
    assert torch.equal(out_TO, torch.ones_like(out_TO))


def test_experts_have_adapters_of_their_own(device: str, lora: ModuleType) -> None:
    num_experts, top_k, num_tokens = 4, 2, 9
    adapters = make_adapters(device, 64, (48,), 32, num_experts)
    x_TD = torch.randn(num_tokens, 64, device=device)
    slots_T = torch.arange(num_tokens, dtype=torch.int32, device=device) % (NUM_SLOTS + 1) - 1
    experts_TK = torch.stack([torch.randperm(num_experts)[:top_k] for _ in range(num_tokens)])
    experts_TK = experts_TK.int().to(device)
    weights_N = torch.rand(num_tokens * top_k, device=device)
    groups = lora.list_groups(slots_T, NUM_SLOTS, experts_TK, num_experts)
    out_NO = torch.ones(num_tokens * top_k, 48, device=device)
    add(lora, adapters, groups, x_TD, out_NO, top_k=top_k, weights_N=weights_N)
    for row, expert in enumerate(experts_TK.flatten().tolist()):
        token = row // top_k
        expected = torch.zeros(1, 48, device=device)
        adapters.add_rows_(expected, x_TD[token : token + 1], slots_T[token : token + 1], expert)
        expected = expected * weights_N[row] + 1
        torch.testing.assert_close(out_NO[row : row + 1], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("per_inner", [2, 1])
def test_fused_experts_with_adapters_are_those_of_the_loop(
    device: str, lora: ModuleType, per_inner: int
) -> None:
    """With gates, and without."""
    from ebbtide.srt.layers.kernels.fused_moe import fused_experts

    num_experts, top_k, num_tokens, hidden, inner = 4, 2, 9, 64, 32
    gate_up = make_adapters(device, hidden, (per_inner * inner,), 32, num_experts)
    down = make_adapters(device, inner, (hidden,), 16, num_experts)
    x_TD = torch.randn(num_tokens, hidden, device=device)
    gate_up_RD = torch.randn(num_experts * per_inner * inner, hidden, device=device) / 8
    down_RI = torch.randn(num_experts * hidden, inner, device=device) / 8
    slots_T = torch.arange(num_tokens, dtype=torch.int32, device=device) % (NUM_SLOTS + 1) - 1
    experts_TK = torch.stack([torch.randperm(num_experts)[:top_k] for _ in range(num_tokens)]).to(device)
    weights_TK = torch.rand(num_tokens, top_k, device=device)
    adapted = AdaptedExperts(
        {"gate_up_proj": gate_up, "down_proj": down}, StepAdapters(slots_T, NUM_SLOTS, None)
    )
    expected_TD = run_experts(x_TD, gate_up_RD, down_RI, weights_TK, experts_TK, adapted)
    config = MoeConfig(num_experts, top_k, inner, renormalize=False)
    factors = adapted.factors(experts_TK.int(), config)
    arguments = (x_TD, gate_up_RD, down_RI, weights_TK, experts_TK.int())
    found_TD = fused_experts(*arguments, adapted=factors)
    torch.testing.assert_close(found_TD, expected_TD, atol=1e-3, rtol=1e-3)
    without_TD = fused_experts(*arguments)
    assert (found_TD[slots_T >= 0] - without_TD[slots_T >= 0]).abs().amax(1).min() > 1e-2
