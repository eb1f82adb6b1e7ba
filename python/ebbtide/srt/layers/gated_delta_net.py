"""Linear attention by the gated delta rule, as in Qwen3-Next and Qwen3.5: a state instead of keys and values.

For each value head the state is a matrix S [key_dim, value_dim], in float32. A token with key k, value v,
decay g ≤ 0 and rate β updates S' = exp(g) S + k ⊗ β (v − exp(g) Sᵀk), and its output is S'ᵀq. Queries, keys
and values are the outputs of a causal convolution over the last few tokens, whose inputs are part of the
state too.

Source: Yang et al. 2024, Gated Delta Networks, https://arxiv.org/abs/2412.06464.

Shapes: T tokens, D hidden, C channels of the convolution, K key heads, V value heads, H head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ebbtide.srt.layers import parameter, state as reference
from ebbtide.srt.layers.heads import Rope
from ebbtide.srt.layers.linear import Linear
from ebbtide.srt.layers.norm import Addend, NormedResidual, tensor_of
from ebbtide.srt.layers.state import StateLayer
from ebbtide.srt.layers.step import Step
from ebbtide.srt.mem_cache import State


@dataclass(frozen=True, slots=True)
class DeltaConfig:
    """Sizes of a layer.

    Attributes:
        conv_size: tokens that the convolution sees, including the current one.
        interleaved: whether projections yield one key head after the other, each with its query, key, values
            and gates, as in Qwen3-Next; otherwise all queries, all keys, all values, all gates.
    """

    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    conv_size: int
    norm_eps: float
    interleaved: bool

    @property
    def k_size(self) -> int:
        return self.num_k_heads * self.k_dim

    @property
    def v_size(self) -> int:
        return self.num_v_heads * self.v_dim

    def state(self, dtype: torch.dtype) -> State:
        """The state: the last inputs of the convolution, and the matrices."""
        inputs = (2 * self.k_size + self.v_size, self.conv_size - 1)
        return State(
            (
                (inputs, str(dtype).removeprefix("torch.")),
                ((self.num_v_heads, self.k_dim, self.v_dim), "float32"),
            )
        )


class GatedDeltaNet(StateLayer):
    """A layer of linear attention: projections, convolution, gated delta rule, norm and gate."""

    def __init__(self, config: DeltaConfig, hidden_size: int, number: int, dtype: torch.dtype) -> None:
        super().__init__(number)
        self.config = config
        channels = 2 * config.k_size + config.v_size
        self.in_proj = Linear(hidden_size, channels + config.v_size, bias=False, dtype=dtype)
        # Not quantised: 8 bits would save little on so few rows, and rounding errors would enter exponents.
        self.rates_proj = Linear(hidden_size, 2 * config.num_v_heads, bias=False, dtype=dtype)
        self.rates_proj.is_quantizable = False
        self.out_proj = Linear(config.v_size, hidden_size, bias=False, dtype=dtype)
        self.conv_weight = parameter(channels, 1, config.conv_size, dtype=dtype)
        self.decay_log = parameter(config.num_v_heads, dtype=torch.float32)
        self.rate_bias = parameter(config.num_v_heads, dtype=torch.float32)
        self.norm_weight = parameter(config.v_dim, dtype=dtype)

    def forward(self, x: NormedResidual, rope: Rope, step: Step) -> Addend:
        assert step.states is not None, "the pass has no states"
        x_TD = tensor_of(x)
        inputs_TC, gates_TVH = self._split(self.in_proj(x_TD, step))
        rates_TV, decays_TV = self._split_rates(self.rates_proj(x_TD, step))
        convolution: Any = reference
        kernels: Any = reference
        if inputs_TC.is_cuda:
            from ebbtide.srt.layers.kernels import convolution, gated_delta as kernels
        conv_states, matrices = step.states.layers[self.number]
        where = (step.positions_T, step.states)
        conv_TC = convolution.convolve(inputs_TC, self.conv_weight, conv_states, *where)
        rates = (rates_TV, decays_TV, self.decay_log, self.rate_bias)
        heads_TVH = kernels.delta_rule(conv_TC, *rates, matrices, *where)
        out_TVH = kernels.gated_norm(heads_TVH, gates_TVH, self.norm_weight, self.config.norm_eps)
        return self.out_proj.addend(out_TVH.flatten(1), step)

    def _split(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        """Split into the inputs of the convolution, and gates."""
        config = self.config
        num_v_heads = len(self.decay_log)
        num_k_heads = num_v_heads * config.num_k_heads // config.num_v_heads
        k_size, v_size = num_k_heads * config.k_dim, num_v_heads * config.v_dim
        if not config.interleaved:
            inputs_TC, gates_TO = torch.split(projected, [2 * k_size + v_size, v_size], dim=1)
            return inputs_TC, torch.unflatten(gates_TO, 1, (num_v_heads, config.v_dim))
        of_key = v_size // num_k_heads
        by_key = projected.view(len(projected), num_k_heads, -1)
        q, k, v, z = torch.split(by_key, [config.k_dim, config.k_dim, of_key, of_key], dim=2)
        inputs_TC = torch.cat([q.flatten(1), k.flatten(1), v.flatten(1)], dim=1)
        return inputs_TC, z.reshape(len(projected), num_v_heads, config.v_dim)

    def _split_rates(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        """Split into the projections from which β and g of each value head are computed."""
        num_v_heads = len(self.decay_log)
        if not self.config.interleaved:
            rates, decays = torch.split(projected, num_v_heads, dim=1)
            return rates, decays
        per_key = self.config.num_v_heads // self.config.num_k_heads
        rates, decays = torch.split(projected.view(len(projected), -1, 2 * per_key), per_key, dim=2)
        return rates.flatten(1), decays.flatten(1)
