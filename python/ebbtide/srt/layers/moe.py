"""Mixture of experts: a router picks a few gated MLPs per token, and their outputs are summed by its weights.

Shapes: T tokens, D hidden, E experts, K experts per token, I an expert's inner size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ebbtide.srt.distributed.parallel_group import ParallelGroup, SoloGroup
from ebbtide.srt.layers.activation import gated
from ebbtide.srt.layers.linear import Linear, linear
from ebbtide.srt.layers.norm import RMSNorm


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


class RouteRecorder:
    """Where every layer leaves the experts of a pass's tokens, at a fixed address: graphs write there too.

    Args:
        max_tokens: of a pass.
        num_layers: all hidden layers; those without experts stay zero.
    """

    def __init__(self, max_tokens: int, num_layers: int, config: MoeConfig, device: torch.device) -> None:
        dtype = torch.uint8 if config.num_experts <= 256 else torch.uint16
        shape = (max_tokens, num_layers, config.num_experts_per_token)
        self.routes_TLK = torch.zeros(shape, dtype=dtype, device=device)

    def record(self, layer: int, experts_TK: Tensor) -> None:
        """What the router of a layer has chosen."""
        self.routes_TLK[: len(experts_TK), layer].copy_(experts_TK)


class GivenRoutes:
    """The experts that tokens of a pass take whatever the router would choose.

    Attributes:
        experts_TLK: int64, of all hidden layers; −1 where the router chooses; None: it does everywhere.
    """

    def __init__(self) -> None:
        self.experts_TLK: Tensor | None = None


class Experts(nn.Module):
    """The weights of all experts of a layer, expert below expert.

    `gate_up_proj` [E·2I, D] holds each expert's gate rows and then its up rows, `down_proj` [E·D, I].

    Attributes:
        group: the ranks that divide every expert's inner columns among them.
        recorder: is told the experts of each token in this `layer`; None: nobody wants to know.
        given: what stands in place of the router's choice.
    """

    def __init__(self, config: MoeConfig, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        num_experts, inner = config.num_experts, config.inner_size
        self.config = config
        self.group: ParallelGroup = SoloGroup()
        self.recorder: RouteRecorder | None = None
        self.given = GivenRoutes()
        self.layer = 0
        self.gate_up_proj = nn.Parameter(
            torch.empty(num_experts * 2 * inner, hidden_size, dtype=dtype, device="meta"), requires_grad=False
        )
        self.down_proj = nn.Parameter(
            torch.empty(num_experts * hidden_size, inner, dtype=dtype, device="meta"), requires_grad=False
        )

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

    def forward(self, x_TD: Tensor, logits_TE: Tensor) -> Tensor:
        """The weighted sum [T, D] of each token's experts, whom the router's scores choose."""
        return self.group.all_reduce_(self._part(x_TD, logits_TE, None))

    def add_to(self, residual_TD: Tensor, x_TD: Tensor, logits_TE: Tensor) -> None:
        """residual += that sum, in place."""
        if self.group.size > 1:
            self.group.add_reduced_(self._part(x_TD, logits_TE, None), residual_TD)
        else:
            self._part(x_TD, logits_TE, residual_TD)

    def _part(self, x_TD: Tensor, logits_TE: Tensor, residual_TD: Tensor | None) -> Tensor:
        """What this rank's columns add to the sum: in place where there is a residual."""
        top_k, renormalize = self.config.num_experts_per_token, self.config.renormalize
        if x_TD.is_cuda:
            from ebbtide.srt.layers.kernels.moe_routing import route as route_at_once

            routed = self._settle(logits_TE, *route_at_once(logits_TE, top_k, renormalize))
            return self.run_fused(x_TD, *routed, residual_TD)
        chosen = self._settle(logits_TE, *route(logits_TE, top_k, renormalize))
        out_TD = self.run(x_TD, *chosen)
        return out_TD if residual_TD is None else residual_TD.add_(out_TD)

    def _settle(self, logits_TE: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> tuple[Tensor, Tensor]:
        """The weights and numbers of each token's experts, as the router or somebody before it chose them."""
        if self.given.experts_TLK is not None:
            given_TK = self.given.experts_TLK[:, self.layer]
            weights_TK, experts_TK = reroute(
                logits_TE, weights_TK, experts_TK, given_TK, self.config.renormalize
            )
        if self.recorder is not None:
            self.recorder.record(self.layer, experts_TK)
        return weights_TK, experts_TK


class MoeMLP(nn.Module):
    """What stands in a decoder layer in place of the MLP."""

    takes_begun = False

    def __init__(self, config: MoeConfig, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate = Linear(hidden_size, config.num_experts, bias=False, dtype=dtype)
        # Few outputs, and what they decide is not to be rounded.
        self.gate.is_quantizable = False
        self.experts = Experts(config, hidden_size, dtype)

    def forward(self, x_TD: Tensor) -> Tensor:
        """[T, D] of the normalised hidden states [T, D]."""
        out_TD: Tensor = self.experts(x_TD, self.scores(x_TD))
        return out_TD

    def add_to(
        self, residual_TD: Tensor, norm: RMSNorm, begun: object = None, then: RMSNorm | None = None
    ) -> None:
        """residual += what the experts make of norm(residual), in place."""
        x_TD = norm(residual_TD)
        self.experts.add_to(residual_TD, x_TD, self.scores(x_TD))

    def scores(self, x_TD: Tensor) -> Tensor:
        """The router's, [T, E]."""
        # It has so few outputs that the kernels for few tokens gain nothing unless there is only one.
        return self.gate.project(x_TD) if len(x_TD) == 1 else self.gate.multiply(x_TD, None)


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
