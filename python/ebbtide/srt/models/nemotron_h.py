"""Nemotron-H and Nemotron-3. Each layer is one of: Mamba-2, attention without rotation, an MLP, experts.

A Mamba-2 layer keeps a state of each request instead of keys and values. For each head it is a matrix
S [head_dim, state_size], in float32. A token has inputs x, vectors b and c, which the heads of a group share,
and a time step d = softplus(δ + bias). It updates S' = exp(−a d) S + d x ⊗ b, where a = exp(decay_log), and
its output is S' c + skip · x. Inputs and vectors are the outputs of a causal convolution over a few tokens,
whose last inputs are part of the state too.

Source: Dao and Gu 2024, Transformers are SSMs, https://arxiv.org/abs/2405.21060.

Shapes: T tokens, C channels of the convolution, N heads, H head_dim, I inner size.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ebbtide.srt.errors import ConfigurationError
from ebbtide.srt.layers import parameter, state as reference
from ebbtide.srt.layers.heads import AttentionKind, MoeConfig, Rope
from ebbtide.srt.layers.linear import Linear
from ebbtide.srt.layers.moe import MoeMLP
from ebbtide.srt.layers.norm import Addend, NormedResidual, Residual, squared_relu
from ebbtide.srt.layers.rotary import RopeConfig
from ebbtide.srt.layers.state import StateLayer
from ebbtide.srt.layers.step import Step
from ebbtide.srt.mem_cache import CacheSpec, Paged, State
from ebbtide.srt.models.base import (
    INPUTS,
    OUTPUTS,
    Split,
    WeightMap,
    WeightTarget,
    mlp_map,
    projection,
    stacked,
)
from ebbtide.srt.models.dense import (
    FULL,
    Attention,
    DenseCausalLM,
    DenseConfig,
    attention_map,
    outer_map,
)
from ebbtide.srt.models.moe import (
    ExpertNames,
    check_experts,
    expert_map,
    joint_expert_map,
    routed_layers,
)

MAMBA, MLP, MOE = "linear_attention", "mlp", "moe"
# Transformers' names of layer types, current and older.
_TYPES = {MAMBA: MAMBA, "mamba": MAMBA, FULL: FULL, "attention": FULL, MLP: MLP, MOE: MOE}
# An infinite factor makes all angles zero.
_NO_ROTATION = RopeConfig("linear", theta=1.0, factor=math.inf)


@dataclass(frozen=True, slots=True)
class MambaConfig:
    """Sizes of a Mamba-2 layer.

    Attributes:
        num_groups: groups of heads that share b and c; the norm works on their channels separately.
        conv_size: tokens that the convolution sees, including the current one.
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
        """The numbers in b, or in c, of all groups."""
        return self.num_groups * self.state_size

    @property
    def channels(self) -> int:
        return self.inner_size + 2 * self.vectors_size

    def state(self, dtype: torch.dtype) -> State:
        """The state: the last inputs of the convolution, and the matrices."""
        return State(
            (
                ((self.channels, self.conv_size - 1), str(dtype).removeprefix("torch.")),
                ((self.num_heads, self.head_dim, self.state_size), "float32"),
            )
        )


class Mamba2(StateLayer):
    """A Mamba-2 layer: projections, convolution, scan, gate and norm."""

    def __init__(self, config: MambaConfig, hidden_size: int, number: int, dtype: torch.dtype) -> None:
        super().__init__(number)
        self.config = config
        # Gates of all heads, channels of the convolution, and time steps (δ) of all heads.
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
        # The groups of this rank.
        num_groups = config.num_groups * len(self.decay_log) // config.num_heads
        out_TI = kernels.gated_group_norm(
            heads_TNH.flatten(1), gates_TI, self.norm_weight, num_groups, config.norm_eps
        )
        return self.out_proj.addend(out_TI, step)


@dataclass(frozen=True, kw_only=True)
class HybridConfig(DenseConfig):
    """Sizes of the decoder, besides those of a dense one.

    Attributes:
        types: each layer's type.
        mamba, moe: sizes of the layers of these types, if there are any.
    """

    types: tuple[str, ...]
    mamba: MambaConfig
    moe: MoeConfig

    @property
    def attention_layers(self) -> list[int]:
        return self.layers_of(FULL)

    def layers_of(self, name: str) -> list[int]:
        return [layer for layer, each in enumerate(self.types) if each == name]


class SquaredMLP(nn.Module):
    """An MLP of relu(up(x))², projected back."""

    def __init__(self, hidden_size: int, inner_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.up_proj = Linear(hidden_size, inner_size, bias=False, dtype=dtype)
        self.down_proj = Linear(inner_size, hidden_size, bias=False, dtype=dtype)

    def forward(self, x: Tensor | NormedResidual, step: Step) -> Addend:
        return self.down_proj.addend(squared_relu(self.up_proj(x, step)), step)


class HybridBlock(nn.Module):
    """One decoder layer: a norm and a mixer, the only thing that the layer does."""

    def __init__(self, config: HybridConfig, dtype: torch.dtype, layer: int) -> None:
        super().__init__()
        self.norm = config.norm(dtype)
        name, hidden = config.types[layer], config.hidden_size
        self._mixes_tokens = name in (MAMBA, FULL)
        self.mixer: nn.Module
        if name == FULL:
            self.mixer = Attention(config, layer, dtype)
        elif name == MAMBA:
            self.mixer = Mamba2(config.mamba, hidden, config.layers_of(MAMBA).index(layer), dtype)
        elif name == MLP:
            self.mixer = SquaredMLP(hidden, config.intermediate_size, dtype)
        else:
            shared = SquaredMLP(hidden, config.moe.shared_size, dtype)
            self.mixer = MoeMLP(config.moe, hidden, dtype, layer, shared)

    def forward(self, x: Residual, rope: Rope, step: Step, wanted_M: Tensor | None = None) -> None:
        """Add to the residual stream. `wanted_M`: the rows that are still needed after the layer."""
        if self._mixes_tokens:
            x.add(self.mixer(x.normed(self.norm), rope, step))
            x.keep(wanted_M)
        else:
            x.keep(wanted_M)
            x.add(self.mixer(x.normed(self.norm), step))


class NemotronHForCausalLM(DenseCausalLM):
    """Nemotron-H's decoder. Draft layers in checkpoints are ignored.

    Raises ConfigurationError: a layer type is not supported, or sizes do not fit together.
    """

    config: HybridConfig

    def __init__(self, hf_config: Any, dtype: torch.dtype, device: torch.device) -> None:
        config = nemotron_config(hf_config)
        super().__init__(config, dtype, device, lambda layer: HybridBlock(config, dtype, layer))
        if sparse_layers := config.layers_of(MOE):
            self.routed = routed_layers(config.moe, config.num_layers, sparse_layers)

    @property
    def cache_specs(self) -> Sequence[CacheSpec]:
        config = self.config
        specs: list[CacheSpec] = []
        for name in config.types:
            if name == FULL:
                specs.append(Paged(config.num_kv_heads, config.head_dim, None))
            elif name == MAMBA:
                specs.append(config.mamba.state(self.model.norm.weight.dtype))
        return specs

    def checkpoint_map(self) -> WeightMap:
        names = {"model.embed_tokens.weight": "embeddings.weight", "model.norm.weight": "norm_f.weight"}
        outer = outer_map(self.config)
        rows = {f"backbone.{names[name]}": outer.pop(name) for name in names} | outer
        for layer in range(self.config.num_layers):
            parameters = f"model.layers.{layer}."
            for name, target in self.layer_map(layer).items():
                target = replace(target, parameter=parameters + target.parameter)
                rows[f"backbone.layers.{layer}.{name}"] = target
        return rows

    def joint_map(self) -> WeightMap:
        rows: WeightMap = {}
        for layer in self.config.layers_of(MOE):
            names = f"backbone.layers.{layer}.mixer", f"model.layers.{layer}.mixer"
            rows |= joint_expert_map(self.config.moe, self.config.hidden_size, *names)
        return rows

    def layer_map(self, layer: int) -> WeightMap:
        config, name = self.config, self.config.types[layer]
        if name == FULL:
            rows = _in_mixer(attention_map(config), "self_attn.")
        elif name == MAMBA:
            rows = mamba_map(config)
        elif name == MLP:
            sizes = config.hidden_size, config.intermediate_size
            what = "intermediate_size of mixer"
            rows = mlp_map("mixer", ["mixer.up_proj"], "mixer.down_proj", *sizes, what=what)
        else:
            rows = experts_map(config)
        return rows | stacked("norm.weight", {"norm.weight": config.hidden_size})

    def also_called(self, name: str) -> str | None:
        """The name in transformers' parameters."""
        inner = name.removeprefix("backbone.")
        return None if inner == name else f"model.{inner}"

    def stored_as(self, name: str) -> str:
        inner = name.removeprefix("model.")
        return name if inner == name else f"backbone.{inner}"

    def ignored(self, name: str) -> bool:
        return name.startswith("mtp.")


def nemotron_config(hf_config: Any) -> HybridConfig:
    """Read the sizes from a Hugging Face config."""
    types = _types(hf_config.layers_block_type)
    low, high = hf_config.time_step_limit
    if (low, high) != (0.0, math.inf):
        raise ConfigurationError(f"time_step_limit: expected [0.0, Infinity], got [{low}, {high}]")
    head_dim, mamba, moe = hf_config.head_dim, _mamba(hf_config), _moe(hf_config)
    if MAMBA in types:
        _check_mamba(mamba)
    if MOE in types:
        check_experts(moe)
    return HybridConfig(
        vocab_size=hf_config.vocab_size,
        hidden_size=hf_config.hidden_size,
        intermediate_size=hf_config.intermediate_size,
        num_layers=len(types),
        num_heads=hf_config.num_attention_heads,
        num_kv_heads=hf_config.num_key_value_heads,
        head_dim=head_dim,
        norm_eps=hf_config.layer_norm_epsilon,
        kinds=(AttentionKind(head_dim**-0.5),) * len(types),
        ropes=(_NO_ROTATION,) * len(types),
        tied=False,
        types=types,
        mamba=mamba,
        moe=moe,
    )


def _types(names: Sequence[str]) -> tuple[str, ...]:
    if unknown := set(names) - _TYPES.keys():
        raise ConfigurationError(
            f"layer type {min(unknown)!r} is not supported; supported are {', '.join(_TYPES)}"
        )
    types = tuple(_TYPES[name] for name in names)
    if FULL not in types:
        raise ConfigurationError(f"layers_block_type: expected one {FULL} or more")
    return types


def _mamba(hf_config: Any) -> MambaConfig:
    return MambaConfig(
        num_heads=hf_config.mamba_num_heads,
        head_dim=hf_config.mamba_head_dim,
        num_groups=hf_config.n_groups,
        state_size=hf_config.ssm_state_size,
        conv_size=hf_config.conv_kernel,
        norm_eps=hf_config.layer_norm_epsilon,
    )


def _check_mamba(mamba: MambaConfig) -> None:
    if mamba.num_heads % mamba.num_groups:
        raise ConfigurationError(
            f"mamba_num_heads: expected a multiple of the {mamba.num_groups} groups, got {mamba.num_heads}"
        )
    if mamba.conv_size < 2:
        raise ConfigurationError("conv_kernel: expected 2 or more")


def _moe(hf_config: Any) -> MoeConfig:
    return MoeConfig(
        num_experts=hf_config.n_routed_experts,
        num_experts_per_token=hf_config.num_experts_per_tok,
        inner_size=hf_config.moe_intermediate_size,
        renormalize=bool(hf_config.norm_topk_prob),
        scoring="sigmoid",
        has_bias=True,
        num_groups=hf_config.n_group,
        num_kept_groups=hf_config.topk_group,
        scale=float(hf_config.routed_scaling_factor),
        shared_size=hf_config.moe_shared_expert_intermediate_size,
        is_gated=False,
        latent_size=getattr(hf_config, "moe_latent_size", None) or 0,
    )


def _in_mixer(rows: WeightMap, prefix: str) -> WeightMap:
    """The map of a part of other decoders' layers, under the names of a mixer."""
    return {
        name.replace(prefix, "mixer.", 1): replace(
            target, parameter=target.parameter.replace(prefix, "mixer.", 1)
        )
        for name, target in rows.items()
    }


def mamba_map(config: HybridConfig) -> WeightMap:
    """Shard/fuse map of a Mamba-2 layer, which ranks divide by groups and their heads."""
    mamba, hidden = config.mamba, config.hidden_size
    inner, vectors, heads = mamba.inner_size, mamba.vectors_size, mamba.num_heads
    by_group = Split(OUTPUTS, mamba.num_groups, "n_groups")
    of_conv = replace(by_group, runs=(inner, vectors, vectors))
    of_inputs = replace(by_group, runs=(inner, inner, vectors, vectors, heads))
    inputs, outputs = {"mixer.in_proj": sum(of_inputs.runs)}, {"mixer.out_proj": hidden}
    rows = projection("mixer.in_proj", inputs, hidden, split=of_inputs)
    rows |= projection("mixer.out_proj", outputs, inner, split=replace(by_group, dim=INPUTS))
    others: dict[str, tuple[str, tuple[int, ...], Split]] = {
        "conv1d.weight": ("conv_weight", (mamba.channels, 1, mamba.conv_size), of_conv),
        "conv1d.bias": ("conv_bias", (mamba.channels,), of_conv),
        "A_log": ("decay_log", (heads,), by_group),
        "dt_bias": ("step_bias", (heads,), by_group),
        "D": ("skip", (heads,), by_group),
        "norm.weight": ("norm_weight", (inner,), by_group),
    }
    return rows | {
        f"mixer.{name}": WeightTarget(f"mixer.{parameter}", 0, shape[0], shape, split)
        for name, (parameter, shape, split) in others.items()
    }


def experts_map(config: HybridConfig) -> WeightMap:
    """Shard/fuse map of a layer with experts."""
    moe, hidden = config.moe, config.hidden_size
    rows = expert_map(moe, hidden, ExpertNames("mixer"), "mixer")
    if moe.latent_size:
        to, back = {"mixer.fc1_latent_proj": moe.latent_size}, {"mixer.fc2_latent_proj": hidden}
        rows |= projection("mixer.to_latents", to, hidden)
        rows |= projection("mixer.from_latents", back, moe.latent_size)
    return rows
