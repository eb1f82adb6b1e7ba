"""Routing and experts: the CPU's loop against plain formulas, and the kernels against the loop."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fixtures.kernels import DEVICE, HAS_GPU, needs_gpu
from torch import Tensor, nn

from ebbtide.srt.layers.heads import BiasedWeights, Clamp, MoeConfig, RoutedTokens
from ebbtide.srt.layers.moe import (
    MoeMLP,
    reroute,
    route,
    run_biased_experts,
    run_experts,
)
from ebbtide.srt.layers.step import Kernels, Step

pytest.importorskip("triton")
from ebbtide.srt.layers.kernels import biased_moe, moe_routing, tiles
from ebbtide.srt.layers.kernels.fused_moe import fused_experts

HALF = torch.bfloat16 if HAS_GPU else torch.float16
NO_TOKENS = torch.zeros(0, dtype=torch.int64)
NO_ATTENTION: Any = None
STEP = Step(NO_TOKENS, NO_TOKENS, NO_ATTENTION, Kernels.for_(DEVICE, torch.bfloat16))


def config_of(num_experts: int, top_k: int, renormalize: bool) -> MoeConfig:
    return MoeConfig(num_experts, top_k, 24, renormalize)


def random_experts(
    num_experts: int,
    hidden: int,
    inner: int,
    dtype: torch.dtype,
    device: torch.device = DEVICE,
    *,
    is_gated: bool = True,
) -> tuple[Tensor, Tensor]:
    num_rows = num_experts * inner * (2 if is_gated else 1)
    gate_up = torch.randn(num_rows, hidden, device=device) / hidden**0.5
    down = torch.randn(num_experts * hidden, inner, device=device) / inner**0.5
    return gate_up.to(dtype), down.to(dtype)


def plain_experts(tokens: RoutedTokens, gate_up_RD: Tensor, down_RI: Tensor) -> Tensor:
    """By the definition, token by token, in float64."""
    x_TD, weights_TK, experts_TK = tokens
    hidden, inner = x_TD.shape[1], down_RI.shape[1]
    gates, ups = gate_up_RD.double().view(-1, 2, inner, hidden).unbind(1)
    downs = down_RI.double().view(-1, hidden, inner)
    rows = []
    for x, weights, experts in zip(x_TD.double(), weights_TK.double(), experts_TK.tolist(), strict=True):
        parts = [downs[e] @ (F.silu(gates[e] @ x) * (ups[e] @ x)) for e in experts]
        rows.append(sum(w * part for w, part in zip(weights, parts, strict=True)))
    return torch.stack(rows)


def check_close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    # Rounding each expert's output to the narrow type costs a few units of its last place.
    tolerance = 1e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("renormalize", [False, True])
def test_a_token_gets_its_best_experts_by_their_probability(renormalize: bool) -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0], [5.0, 4.0, -1.0, 4.5]])

    weights, experts = route(logits, config_of(4, 2, renormalize))

    assert experts.tolist() == [[1, 3], [0, 3]]
    chosen = logits.softmax(-1).gather(1, experts)
    torch.testing.assert_close(weights, chosen / chosen.sum(-1, keepdim=True) if renormalize else chosen)


GROUPED = MoeConfig(
    8, 3, 24, renormalize=True, scoring="sigmoid", has_bias=True, num_groups=4, num_kept_groups=2
)


def test_a_bias_and_groups_decide_who_is_chosen_and_scores_what_they_weigh() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 2.9, -1.0, -1.0, 4.0, -9.0]])
    bias = torch.tensor([0.0, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0])

    weights, experts = route(logits, replace(GROUPED, scale=2.5), bias)

    # The group of the highest score has a low one beside it. The bias brings one in front of a higher one.
    assert experts.tolist() == [[2, 0, 3]]
    chosen = logits[0, [2, 0, 3]].sigmoid()
    torch.testing.assert_close(weights[0], 2.5 * chosen / chosen.sum())


@pytest.mark.parametrize("config", [GROUPED, replace(GROUPED, scale=2.5), config_of(8, 3, False)], ids=str)
def test_experts_that_are_given_weigh_what_they_do_when_a_router_chooses_them(config: MoeConfig) -> None:
    torch.manual_seed(6)
    logits = torch.randn(5, 8)
    weights, experts = route(logits, config, torch.zeros(8) if config.has_bias else None)
    given = experts.clone()
    given[3:] = -1  # the choice holds

    rerouted = reroute(logits, weights.clone().fill_(7.0), experts.flip(1), given, config)

    torch.testing.assert_close(rerouted[0][:3], weights[:3])
    assert torch.equal(rerouted[1][:3], experts[:3])
    assert rerouted[0][3:].eq(7.0).all()
    assert torch.equal(rerouted[1][3:], experts[3:].flip(1))


@pytest.mark.parametrize("num_tokens", [1, 2, 19])
def test_the_loop_computes_the_weighted_sum_of_the_chosen_experts(num_tokens: int) -> None:
    torch.manual_seed(num_tokens)
    x = torch.randn(num_tokens, 32)
    gate_up, down = random_experts(6, 32, 24, torch.float32, torch.device("cpu"))
    tokens = RoutedTokens(x, *route(torch.randn(num_tokens, 6), config_of(6, 3, False)))

    out = run_experts(tokens, gate_up, down)

    check_close(out, plain_experts(tokens, gate_up, down), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize(
    "config",
    [
        config_of(128, 8, True),
        config_of(60, 4, False),
        MoeConfig(64, 6, 24, renormalize=True, scoring="sigmoid", has_bias=True, scale=2.446),
        MoeConfig(64, 5, 24, renormalize=True, scoring="sigmoid", num_groups=8, num_kept_groups=4),
        replace(GROUPED, num_experts=32, scale=2.5),
        MoeConfig(32, 3, 24, False, num_groups=8, num_kept_groups=3, num_group_scores=1, scale=16.0),
    ],
    ids=str,
)
def test_the_routing_kernel_agrees(config: MoeConfig, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    # No two scores of a token are equal: whichever comes first would be right.
    ranks = torch.stack([torch.randperm(config.num_experts) for _ in range(9)])
    logits = (ranks / config.num_experts * 8 - 4).to(DEVICE, dtype)
    bias = 0.3 * torch.randn(config.num_experts, device=DEVICE) if config.has_bias else None
    assert config.routes_at_once

    weights, experts = moe_routing.route(logits, config, bias)

    expected_weights, expected_experts = route(logits, config, bias)
    assert torch.equal(experts.long(), expected_experts)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_tokens", [1, 3, 33])
def test_few_tokens_are_scored_as_in_float32(num_tokens: int) -> None:
    torch.manual_seed(3)
    x = torch.randn(num_tokens, 600, device=DEVICE).to(HALF)
    weight = torch.randn(5, 600, device=DEVICE)

    scores = moe_routing.score(x, weight)

    torch.testing.assert_close(scores, x.float() @ weight.T, rtol=1e-5, atol=1e-4)


def test_scores_that_are_no_numbers_lead_to_existing_experts() -> None:
    inf, nan = float("inf"), float("nan")
    logits = torch.tensor([[nan] * 6, [-inf] * 6, [nan, inf, 0.0, -inf, inf, 1.0]], device=DEVICE)

    bias = torch.tensor([0.0, nan, -inf, inf, 0.1, 0.2], device=DEVICE)
    by_sigmoid = MoeConfig(6, 4, 24, renormalize=True, scoring="sigmoid")
    for config, added in ((config_of(6, 4, True), None), (by_sigmoid, None), (by_sigmoid, bias)):
        _, experts = moe_routing.route(logits, config, added)

        for row in experts.tolist():
            assert len(set(row)) == 4
            assert set(row) <= set(range(6))


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "hidden", "inner", "dtype", "is_gated"),
    [
        (1, 8, 2, 64, 48, HALF, True),
        (5, 16, 3, 80, 40, HALF, False),
        (2, 4, 4, 32, 16, torch.float32, True),  # more slots than experts
        (3, 4, 2, 40, 24, HALF, True),  # more than one tile of columns
        (5, 16, 3, 80, 40, torch.float32, True),  # from here on slots are listed; K no power of two
        (5, 16, 3, 80, 40, HALF, True),  # sizes no multiple of a tile
        (90, 4, 2, 136, 72, HALF, True),
    ],
    ids=str,
)
def test_the_kernels_agree_with_the_loop(
    num_tokens: int, num_experts: int, top_k: int, hidden: int, inner: int, dtype: torch.dtype, is_gated: bool
) -> None:
    torch.manual_seed(1)
    x = torch.randn(num_tokens, hidden).to(DEVICE, dtype)
    gate_up, down = random_experts(num_experts, hidden, inner, dtype, is_gated=is_gated)
    logits = torch.randn(num_tokens, num_experts, device=DEVICE)
    tokens = RoutedTokens(x, *route(logits, config_of(num_experts, top_k, True)))

    plan = None
    if num_tokens == 3:
        plan = tiles.Plan(1, tiles.Tile(4, 16, 4, 1), tiles.Tile(4, 16, 4, 1))
    narrow = tokens._replace(experts_TK=tokens.experts_TK.int())
    out = fused_experts(narrow, gate_up, down, plan)
    residual = x.clone()
    fused_experts(narrow, gate_up, down, plan, residual_TD=residual)

    expected = run_experts(tokens, gate_up, down)
    assert out.dtype == dtype
    check_close(out, expected, dtype)
    check_close(residual, x + expected, dtype)


CLAMP = Clamp(1.5, 0.8)  # a limit that some numbers reach


def random_biased_experts(num_experts: int, hidden: int, inner: int, dtype: torch.dtype) -> BiasedWeights:
    def random(*shape: int) -> Tensor:
        return (torch.randn(shape, device=DEVICE) / shape[1] ** 0.5).to(dtype)

    biases = random(num_experts, 2 * inner), random(num_experts, hidden)
    first, second = random(num_experts, hidden, 2 * inner), random(num_experts, inner, hidden)
    return BiasedWeights(first, biases[0], second, biases[1])


@pytest.mark.parametrize(
    ("num_tokens", "top_k", "hidden", "inner", "dtype"),
    [
        (1, 2, 64, 48, HALF),
        (2, 4, 40, 24, torch.float32),
        (5, 3, 160, 40, HALF),
    ],
    ids=str,
)
def test_the_kernels_of_biased_experts_agree_with_the_loop(
    num_tokens: int,
    top_k: int,
    hidden: int,
    inner: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(biased_moe, "_MAX_SLOTS", 9)
    torch.manual_seed(8)
    x = torch.randn(num_tokens, hidden).to(DEVICE, dtype)
    expert_weights = random_biased_experts(8, hidden, inner, dtype)
    logits = torch.randn(num_tokens, 8, device=DEVICE)
    tokens = RoutedTokens(x, *route(logits, config_of(8, top_k, True)))
    narrow = tokens._replace(experts_TK=tokens.experts_TK.int())

    for fused in (biased_moe.one_by_one, biased_moe.by_groups):
        expected = run_biased_experts(tokens, expert_weights, CLAMP)
        check_close(fused(narrow, expert_weights, CLAMP), expected, dtype)
        for given in (expert_weights, expert_weights._replace(down_bias_ED=None)):
            expected = run_biased_experts(tokens, given, CLAMP)
            residual = x.clone()
            fused(narrow, given, CLAMP, residual)
            check_close(residual, x + expected, dtype)


@needs_gpu
@pytest.mark.parametrize("num_tokens", [1, 4, 32, 256, 2048])
def test_biased_experts_on_a_gpu_at_real_sizes_in_bfloat16(num_tokens: int) -> None:
    torch.manual_seed(9)
    x = torch.randn(num_tokens, 2880).to(DEVICE, torch.bfloat16)
    expert_weights = random_biased_experts(32, 2880, 2880, torch.bfloat16)
    weights, experts = route(torch.randn(num_tokens, 32, device=DEVICE), config_of(32, 4, True))
    clamp = Clamp(1.702, 7.0)

    tokens = RoutedTokens(x, weights, experts.int())
    out = biased_moe.fused_biased_experts(tokens, expert_weights, clamp)

    wide = BiasedWeights(*(weight.float() for weight in expert_weights if weight is not None))
    expected = run_biased_experts(RoutedTokens(x.float(), weights, experts), wide, clamp)
    assert (out.float() - expected).norm() / expected.norm() < 6e-3


@pytest.mark.parametrize("block_tokens", [16, 64])
@pytest.mark.parametrize("favourite", [0, 5])
@pytest.mark.parametrize("few_slots", [64, 4096])
def test_every_slot_is_listed_once_with_its_expert(
    block_tokens: int, favourite: int, few_slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uneven: one expert has all tokens, others few or none. Unused blocks are the last ones."""
    torch.manual_seed(2)
    num_slots, num_experts = 200, 6
    others = torch.tensor([expert for expert in range(num_experts - 1) if expert != favourite])
    second = others[torch.randint(len(others), (num_slots // 2,))]
    experts = torch.stack((torch.full_like(second, favourite), second), dim=1).int().to(DEVICE)
    monkeypatch.setattr(moe_routing, "FEW_SLOTS", few_slots)

    blocks = moe_routing.list_slots(experts, num_experts, block_tokens)

    used = blocks.experts[blocks.experts >= 0]
    assert len(blocks.experts) == blocks.number
    assert torch.equal(blocks.experts[: len(used)], used)
    slots = blocks.slots[: len(used) * block_tokens].view(len(used), block_tokens)
    assert slots.max() <= num_slots
    block, place = (slots < num_slots).nonzero(as_tuple=True)
    listed, order = slots[block, place].sort()
    assert torch.equal(listed, torch.arange(num_slots, dtype=torch.int32, device=DEVICE))
    assert torch.equal(used[block][order], experts.flatten())


def moe_layer(config: MoeConfig, hidden: int, dtype: torch.dtype, device: torch.device) -> MoeMLP:
    layer = MoeMLP(config, hidden, dtype, layer=0)
    gate_up, down = random_experts(config.num_experts, hidden, config.inner_size, dtype, device)
    layer.experts.gate_up_proj = nn.Parameter(gate_up, requires_grad=False)
    layer.experts.down_proj = nn.Parameter(down, requires_grad=False)
    gate = torch.randn(config.num_experts, hidden).to(device, dtype) / hidden**0.5
    layer.gate.weight = nn.Parameter(gate, requires_grad=False)
    return layer


@needs_gpu
@pytest.mark.parametrize("num_tokens", [1, 7, 32, 33, 256, 1500, 4096])
@pytest.mark.parametrize(
    ("hidden", "config"),
    [(2048, MoeConfig(128, 8, 768, renormalize=True)), (1024, MoeConfig(8, 2, 3584, renormalize=True))],
    ids=["qwen3", "mixtral"],
)
def test_on_a_gpu_at_real_sizes_in_bfloat16(num_tokens: int, hidden: int, config: MoeConfig) -> None:
    torch.manual_seed(4)
    layer = moe_layer(config, hidden, torch.bfloat16, DEVICE)
    x = torch.randn(num_tokens, hidden).to(DEVICE, torch.bfloat16)

    out = layer(x, STEP).tensor()

    weights, experts = moe_routing.route(layer.gate(x, STEP), config)
    wide = (layer.experts.gate_up_proj.float(), layer.experts.down_proj.float())
    expected = run_experts(RoutedTokens(x.float(), weights, experts.long()), *wide)
    error = (out.float() - expected).norm() / expected.norm()
    # bfloat16 keeps 8 bits; the inner values and each expert's output are rounded to it.
    assert error < 6e-3
    assert torch.equal(layer(x, STEP).tensor(), out)
