"""Mamba-2, as in Nemotron-H: a state of each request, and no keys and values.

For each head the state is a matrix S [head_dim, state_size], in float32. A token with inputs x and vectors b
and c, which the heads of a group share, has a time step d = softplus(δ + bias) and makes of it
S' = exp(−a d) S + d x ⊗ b, where a = exp(decay_log); its output is S' c + skip · x. Inputs and vectors come
out of a causal convolution over a few tokens, whose inputs are part of the state.

Source: Dao and Gu 2024, Transformers are SSMs, https://arxiv.org/abs/2405.21060.

Shapes: T tokens, D hidden, C channels of the convolution, N heads, H head_dim, I inner size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ebbtide.srt.layers import parameter, state as reference
from ebbtide.srt.layers.heads import Rope
from ebbtide.srt.layers.linear import Linear
from ebbtide.srt.layers.norm import Addend, NormedResidual
from ebbtide.srt.layers.state import StateLayer
from ebbtide.srt.layers.step import Step
from ebbtide.srt.mem_cache import State


@dataclass(frozen=True, slots=True)
class MambaConfig:
    """Sizes of a layer.

    Attributes:
        num_groups: of heads, which share b and c, and of the norm's channels.
        conv_size: tokens that the convolution sees, the current one among them.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    conv_size: int
    norm_eps: float

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def vectors_size(self) -> int:
        """Numbers of b, or c, of all groups."""
        return self.num_groups * self.state_size

    @property
    def channels(self) -> int:
        return self.inner_size + 2 * self.vectors_size

    def state(self, dtype: torch.dtype) -> State:
        """The inputs of the convolution that later tokens see, and the matrices."""
        return State(
            (
                ((self.channels, self.conv_size - 1), str(dtype).removeprefix("torch.")),
                ((self.num_heads, self.head_dim, self.state_size), "float32"),
            )
        )


class Mamba2(StateLayer):
    """Projections, convolution, scan, gate and norm."""

    def __init__(self, config: MambaConfig, hidden_size: int, number: int, dtype: torch.dtype) -> None:
        super().__init__(number)
        self.config = config
        # Gates of all heads, channels of the convolution, and what time steps are made of.
        num_outputs = config.inner_size + config.channels + config.num_heads
        self.in_proj = Linear(hidden_size, num_outputs, bias=False, dtype=dtype)
        self.in_proj.may_be_ragged = True
        self.out_proj = Linear(config.inner_size, hidden_size, bias=False, dtype=dtype)
        self.conv_weight = parameter(config.channels, 1, config.conv_size, dtype=dtype)
        self.conv_bias = parameter(config.channels, dtype=dtype)
        self.decay_log = parameter(config.num_heads, dtype=torch.float32)
        self.step_bias = parameter(config.num_heads, dtype=torch.float32)
        self.skip = parameter(config.num_heads, dtype=torch.float32)
        self.norm_weight = parameter(config.inner_size, dtype=dtype)

    def forward(self, x: NormedResidual, rope: Rope, step: Step) -> Addend:
        assert step.states is not None, "the pass has no states"
        convolution: Any = reference
        kernels: Any = reference
        projected = self.in_proj(x, step)
        if projected.is_cuda:
            from ebbtide.srt.layers.kernels import convolution, mamba2 as kernels
        config, states, positions_T = self.config, step.states, step.positions_T
        sizes = [len(self.norm_weight), len(self.conv_bias), len(self.decay_log)]
        gates_TI, inputs_TC, steps_TN = torch.split(projected, sizes, dim=1)
        conv_states, matrices = states.layers[self.number]
        conv_TC = convolution.convolve(
            inputs_TC, self.conv_weight, conv_states, positions_T, states, self.conv_bias
        )
        heads_TNH = kernels.selective_scan(
            conv_TC, steps_TN, self.decay_log, self.step_bias, self.skip, matrices, positions_T, states
        )
        # Of this rank.
        num_groups = config.num_groups * len(self.decay_log) // config.num_heads
        out_TI = kernels.gated_group_norm(
            heads_TNH.flatten(1), gates_TI, self.norm_weight, num_groups, config.norm_eps
        )
        return self.out_proj.addend(out_TI, step)
