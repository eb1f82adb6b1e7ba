"""What kernels are given besides weights and projections: of attention, and of experts.

Shapes: T tokens, R requests, H head_dim, D hidden, E experts, K experts per token, I an expert's inner size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from ebbtide.srt.layers import parameter


class Rope(NamedTuple):
    """Cosines [T, 1, R], twice the same, and sines [T, 1, R/2] of the positions of one step.

    R: numbers of a head that are rotated, the first ones.
    """

    cos_T1H: Tensor
    sin_T1H: Tensor


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS normalisation of every query and key head, before the rotation.

    Attributes:
        q_weight, k_weight: [H].
        eps: added to the mean of squares.
        offset: added to the weights, see `RMSNorm`.
    """

    q_weight: Tensor
    k_weight: Tensor
    eps: float
    offset: float = 0.0


class AttentionKind(NamedTuple):
    """What layers of a model may differ in.

    Attributes:
        scale: of the scores.
        window: how many tokens a token attends to, itself among them; None: all up to itself.
        soft_cap: scores become soft_cap · tanh(score / soft_cap); None: they stay.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None


class Sinks(nn.Module):
    """The sinks of a layer's query heads, see `LayerAttention`; loaded later."""

    def __init__(self, num_heads: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = parameter(num_heads, dtype=dtype)


@dataclass(frozen=True, slots=True)
class Pages:
    """Which pages each request attends to, int32 tensors on the device.

    Attributes:
        q_indptr_R1: first new token of each request, and the end.
        kv_indptr_R1: first of its page ids in `kv_indices`, and the end.
        kv_indices: page ids.
        last_page_len_R: tokens of its last page.
        most_new: of new tokens of one request.
    """

    q_indptr_R1: Tensor
    kv_indptr_R1: Tensor
    kv_indices: Tensor
    last_page_len_R: Tensor
    most_new: int = 1

    def part(self, first: int, end: int, most_new: int = 1) -> Pages:
        """The requests `first` to `end`. Where they begin, among tokens and page ids, stays the same."""
        return Pages(
            self.q_indptr_R1[first : end + 1],
            self.kv_indptr_R1[first : end + 1],
            self.kv_indices,
            self.last_page_len_R[first:end],
            most_new,
        )


class RoutedTokens(NamedTuple):
    """Tokens, contiguous, with the weights (float32) and numbers of the experts that each of them takes.

    No two of a token's experts are the same one. Kernels take int32 numbers.
    """

    x_TD: Tensor
    weights_TK: Tensor
    experts_TK: Tensor


class Clamp(NamedTuple):
    """The gate of gpt-oss's experts: gate · sigmoid(slope · gate) · (up + 1), kept within a limit."""

    slope: float
    limit: float


@dataclass(frozen=True)
class MoeConfig:
    """Sizes of one layer's experts, and how a token's are chosen.

    Attributes:
        inner_size: of one expert's MLP.
        renormalize: whether the weights of a token's experts are made to sum to one.
        scoring: what makes weights of a router's scores.
        has_bias: whether a bias for each expert, trained with the weights, is added for the choice alone.
        num_groups, num_kept_groups: experts are in groups of equal size, and only those of the best can be
            chosen, by the sum of the highest scores of each.
        num_group_scores: that are summed for that.
        has_wide_router: whether a router's weight is float32 whatever the model's type is.
        scale: what weights are multiplied by.
        shared_size: inner size of the MLP that all tokens take besides their experts; 0: there is none.
        gates_shared: whether that MLP's output is multiplied by a gate of its own.
        clamp: the gate of experts with biases, whose router has one too; None: silu, and no biases.
        is_gated: whether experts compute silu(gate) · up; else relu(up)².
        latent_size: of what experts read and write, which is projected from hidden states and back; 0: they
            read and write these.
    """

    num_experts: int
    num_experts_per_token: int
    inner_size: int
    renormalize: bool
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    has_bias: bool = False
    num_groups: int = 1
    num_kept_groups: int = 1
    num_group_scores: int = 2
    has_wide_router: bool = False
    scale: float = 1.0
    shared_size: int = 0
    gates_shared: bool = False
    clamp: Clamp | None = None
    is_gated: bool = True
    latent_size: int = 0

    @property
    def is_grouped(self) -> bool:
        """Whether experts of some groups cannot be chosen."""
        return self.num_groups > self.num_kept_groups

    @property
    def routes_at_once(self) -> bool:
        """Whether one kernel can choose: it cuts experts into groups by powers of two."""
        sizes = (self.num_experts, self.num_groups)
        return not self.is_grouped or all(size & (size - 1) == 0 for size in sizes)


class BiasedWeights(NamedTuple):
    """What `BiasedExperts` holds, R = 2·I; `down_bias_ED` None: not to be added here."""

    gate_up_EDR: Tensor
    gate_up_bias_ER: Tensor
    down_EID: Tensor
    down_bias_ED: Tensor | None
