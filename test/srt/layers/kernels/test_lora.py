"""The kernels of adapters against the plain products."""

from typing import Any

import pytest
import torch
from fixtures.kernels import DEVICE, HAS_GPU, ON_BOTH

from ebbtide.srt.layers.heads import MoeConfig, RoutedTokens
from ebbtide.srt.layers.lora import ProductAdapters, StepAdapters
from ebbtide.srt.layers.moe import AdaptedExperts, run_experts

pytest.importorskip("triton")
from ebbtide.srt.layers.kernels import lora
from ebbtide.srt.layers.kernels.fused_moe import fused_experts

DTYPES = [torch.float32, torch.bfloat16] if HAS_GPU else [torch.float32]
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
NUM_SLOTS = 3

pytestmark = ON_BOTH


def slots_of(num_tokens: int) -> torch.Tensor:
    """Of any mix of adapters; some tokens have none."""
    return torch.arange(num_tokens, dtype=torch.int32, device=DEVICE) * 7 % (NUM_SLOTS + 1) - 1


def make_adapters(
    num_columns: int,
    ends: tuple[int, ...],
    rank: int,
    num_experts: int = 1,
    dtype: torch.dtype = torch.float32,
) -> ProductAdapters:
    torch.manual_seed(0)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype, device=DEVICE) / 8

    a_SEPD = values(NUM_SLOTS, num_experts, len(ends) * rank, num_columns)
    # Slots have other things between them.
    b_SEOR = values(NUM_SLOTS, 2, num_experts, ends[-1], rank)[:, 0]
    scalings_SP = torch.rand(NUM_SLOTS, 5, device=DEVICE)[:, 1 : 1 + len(ends)]
    return ProductAdapters(a_SEPD, b_SEOR, scalings_SP, ends)


def add(
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
@pytest.mark.parametrize(
    ("num_tokens", "num_columns", "ends", "rank"),
    [
        (1, 96, (64, 96, 128), 16),
        (7, 160, (48,), 48),
        (1, 1088, (40, 80), 80),
        (40, 1088, (40, 80), 80),
        # Tokens of a long prompt share blocks.
        (lora.FEW_ROWS + 100, 64, (32,), 16),
    ],
)
@pytest.mark.parametrize("none_has_one", [False, True])
def test_products_of_any_mix_of_adapters(
    dtype: torch.dtype,
    num_tokens: int,
    num_columns: int,
    ends: tuple[int, ...],
    rank: int,
    none_has_one: bool,
) -> None:
    adapters = make_adapters(num_columns, ends, rank, dtype=dtype)
    x_TD = torch.randn(num_tokens, num_columns, device=DEVICE, dtype=dtype)
    out_TO = torch.randn(num_tokens, ends[-1], device=DEVICE, dtype=dtype)
    slots_T = slots_of(num_tokens)
    if none_has_one:
        slots_T.fill_(-1)
    expected_TO = out_TO.clone()
    adapters.add_rows_(expected_TO, x_TD, slots_T, 0)
    groups = lora.list_groups(slots_T, NUM_SLOTS)
    add(adapters, groups, x_TD, out_TO)
    torch.testing.assert_close(out_TO, expected_TO, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert torch.equal(out_TO[slots_T < 0], expected_TO[slots_T < 0])


@pytest.mark.parametrize("per_inner", [2, 1])
def test_fused_experts_with_adapters_are_those_of_the_loop(per_inner: int) -> None:
    """With gates, and without."""
    num_experts, top_k, num_tokens, hidden, inner = 4, 2, 9, 64, 32
    gate_up = make_adapters(hidden, (per_inner * inner,), 32, num_experts)
    down = make_adapters(inner, (hidden,), 16, num_experts)
    x_TD = torch.randn(num_tokens, hidden, device=DEVICE)
    gate_up_RD = torch.randn(num_experts * per_inner * inner, hidden, device=DEVICE) / 8
    down_RI = torch.randn(num_experts * hidden, inner, device=DEVICE) / 8
    slots_T = slots_of(num_tokens)
    experts_TK = torch.stack([torch.randperm(num_experts)[:top_k] for _ in range(num_tokens)]).to(DEVICE)
    weights_TK = torch.rand(num_tokens, top_k, device=DEVICE)
    adapted = AdaptedExperts(
        {"gate_up_proj": gate_up, "down_proj": down}, StepAdapters(slots_T, NUM_SLOTS, None)
    )
    tokens = RoutedTokens(x_TD, weights_TK, experts_TK)
    expected_TD = run_experts(tokens, gate_up_RD, down_RI, adapted)
    config = MoeConfig(num_experts, top_k, inner, renormalize=False)
    factors = adapted.factors(experts_TK.int(), config)
    arguments = (RoutedTokens(x_TD, weights_TK, experts_TK.int()), gate_up_RD, down_RI)
    found_TD = fused_experts(*arguments, adapted=factors)
    torch.testing.assert_close(found_TD, expected_TD, atol=1e-3, rtol=1e-3)
    without_TD = fused_experts(*arguments)
    assert (found_TD[slots_T >= 0] - without_TD[slots_T >= 0]).abs().amax(1).min() > 1e-2
