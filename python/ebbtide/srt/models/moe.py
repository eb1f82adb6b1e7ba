"""The decoder that mixture-of-experts models share: in some or all layers experts replace the MLP."""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import nn

from ebbtide.srt.errors import ConfigurationError
from ebbtide.srt.layers.heads import MoeConfig
from ebbtide.srt.layers.moe import MoeMLP
from ebbtide.srt.models.base import (
    INPUTS,
    OUTPUTS,
    RoutedLayers,
    Split,
    WeightMap,
    WeightTarget,
    mlp_map,
    stacked,
)
from ebbtide.srt.models.dense import Block, DenseCausalLM, DenseConfig, GatedMLP, dense_layer_map

# The unit by which ranks divide experts.
_INNER = "intermediate_size of the experts"


@dataclass(frozen=True)
class ExpertNames:
    """How checkpoints name the parts of a layer's experts: the module around them, an expert's projections,
    and the shared experts, which all tokens take.
    """

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_experts"


class MoeCausalLM(DenseCausalLM):
    """A decoder with experts.

    Args:
        config: sizes and switches; `intermediate_size` is for the layers without experts.
        moe: sizes of the experts.
        names: how checkpoints name the experts; None: a subclass has its own `expert_map`.
        sparse_layers: the layers with experts.
        dtype, device: as for `DenseCausalLM`.
        make_attention: layer number → its attention; None: `Attention`.

    Raises ConfigurationError: a token takes more experts than there are, groups of experts do not fit
    together, or the activation is not silu.
    """

    def __init__(
        self,
        config: DenseConfig,
        moe: MoeConfig,
        names: ExpertNames | None,
        sparse_layers: Collection[int],
        dtype: torch.dtype,
        device: torch.device,
        make_attention: Callable[[int], nn.Module] | None = None,
    ) -> None:
        check_experts(moe)
        if config.activation != "silu":
            raise ConfigurationError(f"hidden_act {config.activation} is not supported; experts take silu")

        def make_block(layer: int) -> Block:
            attention = make_attention(layer) if make_attention is not None else None
            if layer not in sparse_layers:
                return Block(config, dtype, layer, attention=attention)
            shared = GatedMLP(config, dtype, moe.shared_size) if moe.shared_size else None
            mlp = MoeMLP(moe, config.hidden_size, dtype, layer, shared)
            return Block(config, dtype, layer, mlp, attention)

        super().__init__(config, dtype, device, make_block)
        self.moe, self.names = moe, names
        self.sparse_layers = frozenset(sparse_layers)
        self.routed = routed_layers(moe, config.num_layers, sparse_layers)

    def layer_map(self, layer: int) -> WeightMap:
        rows = dense_layer_map(self.config, layer=layer)
        if layer not in self.sparse_layers:
            return rows
        attention = {name: target for name, target in rows.items() if not name.startswith("mlp.")}
        return attention | self.expert_map()

    def expert_map(self) -> WeightMap:
        """Shard/fuse map of one layer's router and experts, with names relative to the layer."""
        assert self.names is not None
        return expert_map(self.moe, self.config.hidden_size, self.names)

    def joint_map(self) -> WeightMap:
        if self.names is None:
            return {}
        rows: WeightMap = {}
        for layer in sorted(self.sparse_layers):
            prefix = f"model.layers.{layer}."
            names = prefix + self.names.block, prefix + "mlp"
            rows |= joint_expert_map(self.moe, self.config.hidden_size, *names)
        return rows


def check_experts(moe: MoeConfig) -> None:
    """Raises ConfigurationError if numbers of experts and groups do not fit together."""
    if not 1 <= moe.num_experts_per_token <= moe.num_experts:
        raise ConfigurationError(
            f"num_experts_per_tok {moe.num_experts_per_token} is not between 1 and the "
            f"{moe.num_experts} experts"
        )
    group_size, rest = divmod(moe.num_experts, moe.num_groups)
    if rest or (moe.num_kept_groups < moe.num_groups and group_size < moe.num_group_scores):
        raise ConfigurationError(
            f"n_group: expected groups of two experts or more, of {moe.num_experts} in all, got "
            f"{moe.num_groups} groups"
        )


def routed_layers(moe: MoeConfig, num_layers: int, sparse_layers: Collection[int]) -> RoutedLayers:
    """Make the `RoutedLayers` of a model."""
    return RoutedLayers(num_layers, sorted(sparse_layers), moe.num_experts, moe.num_experts_per_token)


def expert_map(moe: MoeConfig, hidden_size: int, names: ExpertNames, module: str = "mlp") -> WeightMap:
    """Shard/fuse map of one layer's router, experts and shared experts, with names relative to the layer.

    Args:
        module: the name of the model's module that holds them.
    """
    outer, parts = moe.latent_size or hidden_size, (names.gate, names.up) if moe.is_gated else (names.up,)
    experts = [f"{names.block}.experts.{expert}" for expert in range(moe.num_experts)]
    gate_up = {f"{expert}.{part}.weight": moe.inner_size for expert in experts for part in parts}
    down = {f"{expert}.{names.down}.weight": outer for expert in experts}
    outputs, inputs = (Split(dim, moe.inner_size, _INNER) for dim in (OUTPUTS, INPUTS))
    rows = stacked(f"{module}.gate.weight", {f"{names.block}.gate.weight": moe.num_experts}, hidden_size)
    if moe.has_bias:
        bias = {f"{names.block}.gate.e_score_correction_bias": moe.num_experts}
        rows |= stacked(f"{module}.gate.bias_E", bias)
    rows |= stacked(f"{module}.experts.gate_up_proj", gate_up, outer, outputs)
    rows |= stacked(f"{module}.experts.down_proj", down, moe.inner_size, inputs)
    if not moe.shared_size:
        return rows
    prefix, size, shared = f"{names.block}.{names.shared}", moe.shared_size, f"{module}.shared_experts"
    if moe.gates_shared:
        rows |= stacked(f"{module}.shared_gate.weight", {f"{prefix}_gate.weight": 1}, hidden_size)
    shared_parts, down_proj = [f"{prefix}.{part}" for part in parts], f"{prefix}.{names.down}"
    return rows | mlp_map(
        shared, shared_parts, down_proj, hidden_size, size, what=f"intermediate_size of {shared}"
    )


def joint_expert_map(moe: MoeConfig, hidden_size: int, block: str, module: str) -> WeightMap:
    """Shard/fuse map of one layer's experts as two joint tensors, as transformers holds them.

    Args:
        block, module: the full names of the checkpoint's and of the model's module.
    """
    outer = moe.latent_size or hidden_size
    runs = (moe.inner_size,) * (2 if moe.is_gated else 1)
    tensors = {
        "gate_up_proj": ((moe.num_experts, sum(runs), outer), Split(1, moe.inner_size, _INNER, runs=runs)),
        "down_proj": ((moe.num_experts, outer, moe.inner_size), Split(2, moe.inner_size, _INNER)),
    }
    rows = {}
    for name, (shape, split) in tensors.items():
        theirs = name if moe.is_gated else name.removeprefix("gate_")
        parameter = f"{module}.experts.{name}"
        rows[f"{block}.experts.{theirs}"] = WeightTarget(parameter, 0, shape[0] * shape[1], shape, split)
    return rows


def is_behind_layers(name: str, num_layers: int) -> bool:
    """Whether a tensor belongs to a layer beyond the model's: checkpoints hold draft layers there."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return layer is not None and int(layer[1]) >= num_layers
