"""Mixture of experts: a router picks a few MLPs per token, and their outputs are summed with its weights.

Shapes: T tokens, D hidden, E experts, K experts per token, I an expert's inner size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ebbtide.srt.distributed.parallel_group import ParallelGroup
from ebbtide.srt.layers import parameter
from ebbtide.srt.layers.heads import BiasedWeights, Clamp, MoeConfig, RoutedTokens
from ebbtide.srt.layers.linear import Inputs, Linear
from ebbtide.srt.layers.lora import ProductAdapters, StepAdapters
from ebbtide.srt.layers.norm import Addend, NormedResidual, gated, squared_relu, tensor_of
from ebbtide.srt.layers.step import Kernels, Step

if TYPE_CHECKING:
    from ebbtide.srt.layers.kernels.lora import ExpertFactors


class Router(Linear):
    """Scores of experts. It has so few outputs that our kernels for few tokens pay only for one token.

    Attributes:
        bias_E: float32, added to scores for the choice only; None: there is none.
    """

    # Rounding could change which experts are chosen.
    is_quantizable = False

    def __init__(self, config: MoeConfig, hidden_size: int, dtype: torch.dtype) -> None:
        # Sigmoid scores of many experts are close together, so such routers are trained and kept in float32.
        dtype = torch.float32 if config.scoring == "sigmoid" or config.has_wide_router else dtype
        super().__init__(hidden_size, config.num_experts, bias=config.clamp is not None, dtype=dtype)
        self.bias_E = parameter(config.num_experts, dtype=torch.float32) if config.has_bias else None

    def multiply(self, x: Inputs, bias_O: Tensor | None, kernels: Kernels) -> Tensor:
        x_TD = x.tensor()
        is_wide = self.weight.dtype == torch.float32 != x_TD.dtype
        if is_wide and bias_O is None and len(x_TD) <= kernels.few:
            from ebbtide.srt.layers.kernels.moe_routing import score

            return score(x_TD, self.weight)
        return F.linear(x_TD.to(self.weight.dtype), self.weight, bias_O)

    def takes_few(self, x_TD: Tensor, kernels: Kernels) -> bool:
        return len(x_TD) <= kernels.few_router and x_TD.dtype == self.weight.dtype


class Experts(nn.Module):
    """The weights of all experts of a layer, one expert below the other.

    `gate_up_proj` [E·2I, D] holds each expert's gate rows, then its up rows; `down_proj` is [E·D, I]. For
    experts without gates `gate_up_proj` [E·I, D] holds only up rows.

    Args:
        layer: the layer's number, which indexes routes.

    Attributes:
        group: the ranks that divide every expert's inner columns.
        adapters: what the slots of adapters hold, by parameter; empty: the experts take no adapters.
    """

    def __init__(self, config: MoeConfig, hidden_size: int, dtype: torch.dtype, layer: int) -> None:
        super().__init__()
        num_experts, inner = config.num_experts, config.inner_size
        self.config, self.layer = config, layer
        self.adapters: dict[str, ProductAdapters] = {}
        self.group = ParallelGroup()
        num_rows = num_experts * inner * (2 if config.is_gated else 1)
        self.gate_up_proj = parameter(num_rows, hidden_size, dtype=dtype)
        self.down_proj = parameter(num_experts * hidden_size, inner, dtype=dtype)

    def forward(self, x_TD: Tensor, logits_TE: Tensor, step: Step, bias_E: Tensor | None = None) -> ExpertSum:
        """Route tokens by the router's logits and bias. Returns the weighted sum [T, D] of their experts."""
        config = self.config
        if x_TD.is_cuda and config.routes_at_once:
            from ebbtide.srt.layers.kernels.moe_routing import route as route_at_once

            weights_TK, experts_TK = route_at_once(logits_TE, config, bias_E)
        else:
            weights_TK, experts_TK = route(logits_TE, config, bias_E)
            experts_TK = experts_TK.int() if x_TD.is_cuda else experts_TK
        if step.given_TLK is not None:
            given_TK = step.given_TLK[:, self.layer]
            weights_TK, experts_TK = reroute(logits_TE, weights_TK, experts_TK, given_TK, config)
        if step.routes_TLK is not None:
            step.routes_TLK[: len(experts_TK), self.layer].copy_(experts_TK)
        tokens = RoutedTokens(x_TD, weights_TK, experts_TK)
        return ExpertSum(self, tokens, step.adapters if self.adapters else None)

    @property
    def scales(self) -> tuple[Tensor, Tensor] | None:
        """The scales of both weights, if these are in 8 bits."""
        return None

    def run(self, tokens: RoutedTokens, adapted: AdaptedExperts | None) -> Tensor:
        """Compute the weighted sum on a device without kernels of ours."""
        return run_experts(tokens, self.gate_up_proj, self.down_proj, adapted)

    def run_fused(
        self, tokens: RoutedTokens, residual_TD: Tensor | None, adapted: ExpertFactors | None
    ) -> Tensor:
        """Compute the weighted sum with our kernels. With a residual, add it to that in place."""
        from ebbtide.srt.layers.kernels.fused_moe import fused_experts

        weights = (self.gate_up_proj, self.down_proj)
        return fused_experts(tokens, *weights, residual_TD=residual_TD, scales=self.scales, adapted=adapted)


@dataclass(frozen=True, slots=True)
class AdaptedExperts:
    """The adapters of a layer's experts, by parameter, and the adapters of a pass."""

    adapters: dict[str, ProductAdapters]
    step: StepAdapters

    def add_rows_(self, parameter: str, out_NO: Tensor, x_ND: Tensor, tokens_N: Tensor, expert: int) -> None:
        """Add adapters to the product of one expert and these tokens' rows."""
        if parameter in self.adapters:
            slots_N = self.step.slots_T[tokens_N]
            self.adapters[parameter].add_rows_(out_NO, x_ND, slots_N, expert)

    def factors(self, experts_TK: Tensor, config: MoeConfig) -> ExpertFactors:
        """The arguments of kernels."""
        from ebbtide.srt.layers.kernels.lora import ExpertFactors, list_groups

        step = self.step
        groups = list_groups(step.slots_T, step.num_slots, experts_TK, config.num_experts)
        factors = {name: adapters.factors for name, adapters in self.adapters.items()}
        return ExpertFactors(groups, factors.get("gate_up_proj"), factors.get("down_proj"))


class BiasedExperts(Experts):
    """Experts with biases and a clamped gate, in the layout of gpt-oss's checkpoints.

    In `gate_up_proj` [E, D, 2I] gate and up of each inner number are neighbours. `down_proj` is [E, I, D].
    """

    def __init__(
        self, config: MoeConfig, clamp: Clamp, hidden_size: int, dtype: torch.dtype, layer: int
    ) -> None:
        super().__init__(config, hidden_size, dtype, layer)
        num_experts, inner = config.num_experts, config.inner_size
        self.clamp = clamp
        self.gate_up_proj = parameter(num_experts, hidden_size, 2 * inner, dtype=dtype)
        self.gate_up_proj_bias = parameter(num_experts, 2 * inner, dtype=dtype)
        self.down_proj = parameter(num_experts, inner, hidden_size, dtype=dtype)
        self.down_proj_bias = parameter(num_experts, hidden_size, dtype=dtype)

    @property
    def weights(self) -> BiasedWeights:
        """The parameters. All ranks hold the biases of the second product, but only one adds them."""
        down_bias = self.down_proj_bias if self.group.rank == 0 else None
        return BiasedWeights(self.gate_up_proj, self.gate_up_proj_bias, self.down_proj, down_bias)

    def run(self, tokens: RoutedTokens, adapted: AdaptedExperts | None) -> Tensor:
        return run_biased_experts(tokens, self.weights, self.clamp)

    def run_fused(
        self, tokens: RoutedTokens, residual_TD: Tensor | None, adapted: ExpertFactors | None
    ) -> Tensor:
        from ebbtide.srt.layers.kernels.biased_moe import fused_biased_experts

        return fused_biased_experts(tokens, self.weights, self.clamp, residual_TD)


@dataclass(slots=True)
class ExpertSum:
    """The weighted sum of each token's experts, computed when it is added to the residual. An `Addend`."""

    experts: Experts
    tokens: RoutedTokens
    adapters: StepAdapters | None = None

    def add_to(self, residual_TD: Tensor) -> None:
        group = self.experts.group
        if group.size > 1:
            group.add_reduced_(self._part(None), residual_TD)
        else:
            self._part(residual_TD)

    def tensor(self) -> Tensor:
        return self.experts.group.all_reduce_(self._part(None))

    def _part(self, residual_TD: Tensor | None) -> Tensor:
        """This rank's part of the sum. With a residual, it is added to that in place."""
        adapted = None if self.adapters is None else AdaptedExperts(self.experts.adapters, self.adapters)
        if self.tokens.x_TD.is_cuda:
            factors = (
                None if adapted is None else adapted.factors(self.tokens.experts_TK, self.experts.config)
            )
            return self.experts.run_fused(self.tokens, residual_TD, factors)
        out_TD = self.experts.run(self.tokens, adapted)
        return out_TD if residual_TD is None else residual_TD.add_(out_TD)


@dataclass(slots=True)
class SumWithShared:
    """The sum of a token's experts and of the MLP that all tokens take. An `Addend`."""

    experts: Addend
    shared: Addend | Tensor

    def add_to(self, residual_TD: Tensor) -> None:
        self.experts.add_to(residual_TD)
        if isinstance(self.shared, Tensor):
            residual_TD += self.shared
        else:
            self.shared.add_to(residual_TD)

    def tensor(self) -> Tensor:
        return self.experts.tensor().add_(tensor_of(self.shared))


class MoeMLP(nn.Module):
    """Replaces the MLP of a decoder layer: a router, and the experts that it chooses from.

    Args:
        shared_experts: the MLP that all tokens take too; None: there is none.
    """

    def __init__(
        self,
        config: MoeConfig,
        hidden_size: int,
        dtype: torch.dtype,
        layer: int,
        shared_experts: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.gate = Router(config, hidden_size, dtype)
        sizes = (config.latent_size or hidden_size, dtype, layer)
        self.experts = (
            Experts(config, *sizes) if config.clamp is None else BiasedExperts(config, config.clamp, *sizes)
        )
        self.to_latents = self.from_latents = None
        if config.latent_size:
            self.to_latents = Linear(hidden_size, config.latent_size, bias=False, dtype=dtype)
            self.from_latents = Linear(config.latent_size, hidden_size, bias=False, dtype=dtype)
        self.shared_experts = shared_experts
        self.shared_gate = None
        if config.gates_shared:
            self.shared_gate = Linear(hidden_size, 1, bias=False, dtype=dtype)
            self.shared_gate.is_quantizable = False

    def forward(self, x: Tensor | NormedResidual, step: Step) -> Addend:
        x_TD = tensor_of(x)
        read = x_TD if self.to_latents is None else self.to_latents(x_TD, step)
        experts: Addend = self.experts(read, self.gate(x_TD, step), step, self.gate.bias_E)
        if self.from_latents is not None:
            experts = self.from_latents.addend(experts.tensor(), step)
        if self.shared_experts is None:
            return experts
        shared = self.shared_experts(x_TD, step)
        if self.shared_gate is not None:
            shared = shared.tensor().mul_(self.shared_gate(x_TD, step).sigmoid_())
        return SumWithShared(experts, shared)


def route(logits_TE: Tensor, config: MoeConfig, bias_E: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Choose each token's experts. Returns weights (float32) and numbers (int64), both [T, K], best first."""
    scores_TE = _scores(logits_TE, config)
    choice_TE = scores_TE if bias_E is None else scores_TE + bias_E
    if config.is_grouped:
        groups_TGN = choice_TE.view(len(choice_TE), config.num_groups, -1)
        group_scores_TG = groups_TGN.topk(config.num_group_scores, dim=2).values.sum(dim=2)
        kept_TG = torch.zeros_like(group_scores_TG, dtype=torch.bool)
        kept_TG.scatter_(1, group_scores_TG.topk(config.num_kept_groups, dim=1).indices, value=True)
        choice_TE = groups_TGN.masked_fill(~kept_TG[:, :, None], -torch.inf).flatten(1)
    experts_TK = choice_TE.topk(config.num_experts_per_token, dim=1).indices
    return _weights(scores_TE, experts_TK, config), experts_TK


def reroute(
    logits_TE: Tensor, weights_TK: Tensor, experts_TK: Tensor, given_TK: Tensor, config: MoeConfig
) -> tuple[Tensor, Tensor]:
    """Replace experts chosen by `route` with given ones (int64; −1: keep), weighted by their own scores."""
    is_given_TK = given_TK >= 0
    own_TK = _weights(_scores(logits_TE, config), given_TK.clamp(min=0), config)
    experts_TK = torch.where(is_given_TK, given_TK.to(experts_TK.dtype), experts_TK)
    return torch.where(is_given_TK, own_TK, weights_TK), experts_TK


def _scores(logits_TE: Tensor, config: MoeConfig) -> Tensor:
    if config.scoring == "sigmoid":
        return logits_TE.to(torch.float32).sigmoid()
    return logits_TE.softmax(dim=-1, dtype=torch.float32)


def _weights(scores_TE: Tensor, experts_TK: Tensor, config: MoeConfig) -> Tensor:
    weights_TK = scores_TE.gather(1, experts_TK)
    if config.renormalize:
        # The small number avoids a division by zero, since sigmoids may all be zero.
        weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True).add_(1e-20)
    return weights_TK if config.scale == 1.0 else weights_TK * config.scale


def run_experts(
    tokens: RoutedTokens, gate_up_RD: Tensor, down_RI: Tensor, adapted: AdaptedExperts | None = None
) -> Tensor:
    """The weighted sum [T, D] of each token's experts, with weights in the layout of `Experts`."""
    hidden, inner = tokens.x_TD.shape[1], down_RI.shape[1]
    num_rows = len(gate_up_RD) * hidden // len(down_RI)

    def mlp(expert: int, x_ND: Tensor, tokens_N: Tensor) -> Tensor:
        gate_up_NR = F.linear(x_ND, gate_up_RD[num_rows * expert : num_rows * (expert + 1)])
        if adapted is not None:
            adapted.add_rows_("gate_up_proj", gate_up_NR, x_ND, tokens_N, expert)
        inner_NI = squared_relu(gate_up_NR) if num_rows == inner else gated(gate_up_NR)
        y_ND = F.linear(inner_NI, down_RI[hidden * expert : hidden * (expert + 1)])
        if adapted is not None:
            adapted.add_rows_("down_proj", y_ND, inner_NI, tokens_N, expert)
        return y_ND

    return _sum_of_experts(tokens, mlp)


def run_biased_experts(tokens: RoutedTokens, weights: BiasedWeights, clamp: Clamp) -> Tensor:
    """`run_experts` for `BiasedExperts`."""

    def mlp(expert: int, x_ND: Tensor, tokens_N: Tensor) -> Tensor:
        gate_up_N2I = x_ND @ weights.gate_up_EDR[expert] + weights.gate_up_bias_ER[expert]
        gate, up = gate_up_N2I[:, ::2].clamp(max=clamp.limit), gate_up_N2I[:, 1::2]
        up = up.clamp(-clamp.limit, clamp.limit)
        y_ND = ((up + 1) * gate * torch.sigmoid(clamp.slope * gate)) @ weights.down_EID[expert]
        return y_ND if weights.down_bias_ED is None else y_ND + weights.down_bias_ED[expert]

    return _sum_of_experts(tokens, mlp)


def _sum_of_experts(tokens: RoutedTokens, mlp: Callable[[int, Tensor, Tensor], Tensor]) -> Tensor:
    """The weighted sum [T, D], computed one expert after the other."""
    x_TD, weights_TK, experts_TK = tokens
    top_k = experts_TK.shape[1]
    counts_E = experts_TK.flatten().bincount().tolist()
    slots = experts_TK.flatten().argsort(stable=True)
    out_TD = torch.zeros(x_TD.shape, dtype=torch.float32, device=x_TD.device)
    first = 0
    for expert, count in enumerate(counts_E):
        if count == 0:
            continue
        slots_N = slots[first : first + count]
        tokens_N = slots_N // top_k
        y_ND = mlp(expert, x_TD[tokens_N], tokens_N)
        # A token occurs once per expert, so its sum is always in the order of experts, and deterministic.
        out_TD.index_add_(0, tokens_N, y_ND.float() * weights_TK.flatten()[slots_N, None])
        first += count
    return out_TD.to(x_TD.dtype)
