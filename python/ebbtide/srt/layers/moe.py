"""Mixture of experts: a router picks a few gated MLPs per token, and their outputs are summed by its weights.

Shapes: T tokens, D hidden, E experts, K experts per token, I an expert's inner size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ebbtide.srt.distributed.parallel_group import ParallelGroup, SoloGroup
from ebbtide.srt.layers.linear import Router, linear
from ebbtide.srt.layers.norm import NormedResidual, RMSNorm, gated, tensor_of
from ebbtide.srt.layers.step import Step


@dataclass(frozen=True)
class MoeConfig:
    """Sizes of one layer's experts.

    Attributes:
        inner_size: of one expert's MLP.
        renormalize: whether the weights of a token's experts are made to sum to one.
    """

    num_experts: int
    num_experts_per_token: int
    inner_size: int
    renormalize: bool


class Experts(nn.Module):
    """The weights of all experts of a layer, expert below expert.

    `gate_up_proj` [E·2I, D] holds each expert's gate rows and then its up rows, `down_proj` [E·D, I].

    Args:
        layer: whose they are: its place among the layers of routes.

    Attributes:
        group: the ranks that divide every expert's inner columns among them.
    """

    def __init__(self, config: MoeConfig, hidden_size: int, dtype: torch.dtype, layer: int) -> None:
        super().__init__()
        num_experts, inner = config.num_experts, config.inner_size
        self.config, self.layer = config, layer
        self.group: ParallelGroup = SoloGroup()
        self.gate_up_proj = nn.Parameter(
            torch.empty(num_experts * 2 * inner, hidden_size, dtype=dtype, device="meta"), requires_grad=False
        )
        self.down_proj = nn.Parameter(
            torch.empty(num_experts * hidden_size, inner, dtype=dtype, device="meta"), requires_grad=False
        )

    def forward(self, x_TD: Tensor, logits_TE: Tensor, step: Step) -> ExpertSum:
        """The weighted sum [T, D] of each token's experts, whom the router's scores choose."""
        top_k, renormalize = self.config.num_experts_per_token, self.config.renormalize
        if x_TD.is_cuda:
            from ebbtide.srt.layers.kernels.moe_routing import route as route_at_once

            weights_TK, experts_TK = route_at_once(logits_TE, top_k, renormalize)
        else:
            weights_TK, experts_TK = route(logits_TE, top_k, renormalize)
        if step.given_TLK is not None:
            given_TK = step.given_TLK[:, self.layer]
            weights_TK, experts_TK = reroute(logits_TE, weights_TK, experts_TK, given_TK, renormalize)
        if step.routes_TLK is not None:
            step.routes_TLK[: len(experts_TK), self.layer].copy_(experts_TK)
        return ExpertSum(self, x_TD, weights_TK, experts_TK)

    def run(self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
        """The weighted sum on a device without kernels of ours."""
        return run_experts(x_TD, self.gate_up_proj, self.down_proj, weights_TK, experts_TK)

    def run_fused(
        self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, residual_TD: Tensor | None
    ) -> Tensor:
        """The weighted sum by kernels of ours: added to the residual, in place, where there is one."""
        from ebbtide.srt.layers.kernels.fused_moe import fused_experts

        weights = (self.gate_up_proj, self.down_proj)
        return fused_experts(x_TD, *weights, weights_TK, experts_TK, residual_TD=residual_TD)


@dataclass(frozen=True, slots=True)
class ExpertSum:
    """The weighted sum of each token's experts, computed when it is added to the residual. An `Addend`."""

    experts: Experts
    x_TD: Tensor
    weights_TK: Tensor
    experts_TK: Tensor

    def add_to(self, residual_TD: Tensor, then: RMSNorm | None) -> None:
        group = self.experts.group
        if group.size > 1:
            group.add_reduced_(self._part(None), residual_TD)
        else:
            self._part(residual_TD)

    def tensor(self) -> Tensor:
        return self.experts.group.all_reduce_(self._part(None))

    def _part(self, residual_TD: Tensor | None) -> Tensor:
        """What this rank's columns add to the sum: in place where there is a residual."""
        chosen = (self.x_TD, self.weights_TK, self.experts_TK)
        if self.x_TD.is_cuda:
            return self.experts.run_fused(*chosen, residual_TD)
        out_TD = self.experts.run(*chosen)
        return out_TD if residual_TD is None else residual_TD.add_(out_TD)


class MoeMLP(nn.Module):
    """What stands in a decoder layer in place of the MLP: a router, and the experts that it chooses from."""

    def __init__(self, config: MoeConfig, hidden_size: int, dtype: torch.dtype, layer: int) -> None:
        super().__init__()
        self.gate = Router(hidden_size, config.num_experts, bias=False, dtype=dtype)
        self.experts = Experts(config, hidden_size, dtype, layer)

    def forward(self, x: Tensor | NormedResidual, step: Step) -> ExpertSum:
        x_TD = tensor_of(x)
        out: ExpertSum = self.experts(x_TD, self.gate(x_TD, step), step)
        return out


def route(logits_TE: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """The weights (float32) and numbers (int64) of each token's experts, both [T, K], best first."""
    weights_TK, experts_TK = torch.topk(logits_TE.softmax(dim=-1, dtype=torch.float32), top_k, dim=-1)
    if renormalize:
        weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
    return weights_TK, experts_TK


def reroute(
    logits_TE: Tensor, weights_TK: Tensor, experts_TK: Tensor, given_TK: Tensor, renormalize: bool
) -> tuple[Tensor, Tensor]:
    """What `route` has chosen with given experts (int64; −1: none) in its place, weighted by their scores."""
    is_given_TK = given_TK >= 0
    own_TK = logits_TE.softmax(dim=-1, dtype=torch.float32).gather(1, given_TK.clamp(min=0))
    if renormalize:
        own_TK = own_TK / own_TK.sum(dim=-1, keepdim=True)
    experts_TK = torch.where(is_given_TK, given_TK.to(experts_TK.dtype), experts_TK)
    return torch.where(is_given_TK, own_TK, weights_TK), experts_TK


def run_experts(
    x_TD: Tensor, gate_up_RD: Tensor, down_RI: Tensor, weights_TK: Tensor, experts_TK: Tensor
) -> Tensor:
    """The weighted sum [T, D] of each token's experts, one expert after the other.

    Args:
        gate_up_RD, down_RI: as `Experts` holds them.
        weights_TK, experts_TK: from `route`.
    """
    hidden, inner, top_k = x_TD.shape[1], down_RI.shape[1], experts_TK.shape[1]
    counts_E = experts_TK.flatten().bincount(minlength=len(down_RI) // hidden).tolist()
    slots = experts_TK.flatten().argsort(stable=True)
    out_TD = torch.zeros(x_TD.shape, dtype=torch.float32, device=x_TD.device)
    first = 0
    for expert, count in enumerate(counts_E):
        if count == 0:
            continue
        slots_N = slots[first : first + count]
        tokens_N = slots_N // top_k
        gate_up_N2I = linear(x_TD[tokens_N], gate_up_RD[2 * inner * expert : 2 * inner * (expert + 1)])
        y_ND = linear(gated(gate_up_N2I), down_RI[hidden * expert : hidden * (expert + 1)])
        # A token occurs once per expert, so the sum over experts has one order: that of the loop.
        out_TD.index_add_(0, tokens_N, y_ND.float() * weights_TK.flatten()[slots_N, None])
        first += count
    return out_TD.to(x_TD.dtype)
