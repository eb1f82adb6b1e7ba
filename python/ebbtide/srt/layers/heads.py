"""Arguments of kernels besides weights and projections, for attention and for experts.

Shapes: T tokens, R requests, H head_dim, D hidden, E experts, K experts per token, I an expert's inner size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from ebbtide.srt.layers import parameter


class Rope(NamedTuple):
    """Cosines [T, 1, R], both halves equal, and sines [T, 1, R/2], for the positions of one pass.

    R: rotated numbers of a head, the first ones.
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
    """What may differ between a model's layers.

    Attributes:
        scale: a factor for the scores.
        window: how many tokens a token attends to, including itself; None: all tokens up to itself.
        soft_cap: scores become soft_cap · tanh(score / soft_cap); None: they stay as they are.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None


class Sinks(nn.Module):
    """The sinks of a layer's query heads, see `LayerAttention`. Their values are loaded later."""

    def __init__(self, num_heads: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = parameter(num_heads, dtype=dtype)


@dataclass(frozen=True, slots=True)
class Pages:
    """The pages that each request attends to, as int32 tensors on the device.

    Attributes:
        q_indptr_R1: first new token of each request, and the end.
        kv_indptr_R1: index in `kv_indices` of each request's first page id, and the end.
        kv_indices: page ids.
        last_page_len_R: tokens in each request's last page.
        most_new: the largest number of new tokens of a request.
    """

    q_indptr_R1: Tensor
    kv_indptr_R1: Tensor
    kv_indices: Tensor
    last_page_len_R: Tensor
    most_new: int = 1

    def part(self, first: int, end: int, most_new: int = 1) -> Pages:
        """The requests from `first` to before `end`. Offsets stay those in the whole batch."""
        return Pages(
            self.q_indptr_R1[first : end + 1],
            self.kv_indptr_R1[first : end + 1],
            self.kv_indices,
            self.last_page_len_R[first:end],
            most_new,
        )


class RoutedTokens(NamedTuple):
    """Tokens, contiguous, with the weights (float32) and numbers of their experts.

    The experts of a token are different. Kernels take int32 numbers.
    """

    x_TD: Tensor
    weights_TK: Tensor
    experts_TK: Tensor


class Clamp(NamedTuple):
    """The gate of gpt-oss's experts: gate · sigmoid(slope · gate) · (up + 1), inputs clamped by `limit`."""

    slope: float
    limit: float


@dataclass(frozen=True)
class MoeConfig:
    """Sizes of one layer's experts, and how tokens are routed to them.

    Attributes:
        inner_size: of one expert's MLP.
        renormalize: whether the weights of a token's experts are scaled to sum to one.
        scoring: the function that turns the router's logits into scores.
        has_bias: whether a bias for each expert is added to the scores for the choice, but not for weights.
        num_groups, num_kept_groups: experts are in groups of equal size, and only experts of the best
            `num_kept_groups` groups can be chosen. Groups are compared by sums of their best scores.
        num_group_scores: how many scores this sum has.
        has_wide_router: whether the router's weight is float32 in any model dtype.
        scale: a factor for the weights.
        shared_size: inner size of the shared MLP that all tokens take too; 0: there is none.
        gates_shared: whether that MLP's output is multiplied by a gate of its own.
        clamp: the gate of experts with biases, whose router has a bias too; None: silu, and no biases.
        is_gated: whether experts compute silu(gate) · up; otherwise relu(up)².
        latent_size: of the vectors that experts read and write, which are projected from hidden states and
            back; 0: experts read and write hidden states.
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
        """Whether only experts of some groups can be chosen."""
        return self.num_groups > self.num_kept_groups

    @property
    def routes_at_once(self) -> bool:
        """Whether one kernel can route: with groups, it needs powers of two."""
        sizes = (self.num_experts, self.num_groups)
        return not self.is_grouped or all(size & (size - 1) == 0 for size in sizes)


class BiasedWeights(NamedTuple):
    """The parameters of `BiasedExperts`, R = 2·I. `down_bias_ED`: None: it is not added on this rank."""

    gate_up_EDR: Tensor
    gate_up_bias_ER: Tensor
    down_EID: Tensor
    down_bias_ED: Tensor | None
