"""Qwen3-Next, and Qwen3.5 and later: most layers have linear attention by the gated delta rule.

Checkpoints for images and text hold a vision tower too, which is ignored.
"""

from typing import Any

import torch

from ebbtide.srt.errors import ConfigurationError
from ebbtide.srt.layers.gated_delta_net import DeltaConfig
from ebbtide.srt.models.base import WeightMap
from ebbtide.srt.models.dense import FULL, DenseCausalLM, DenseConfig, attention_biases, dense_config
from ebbtide.srt.models.moe import MoeCausalLM
from ebbtide.srt.models.qwen import SHARED_NAMES, shared_moe, sparse_layers

LINEAR = "linear_attention"


class Qwen3NextForCausalLM(MoeCausalLM):
    """All layers have experts but those that the config excepts."""

    draft_prefix = "mtp."

    def __init__(self, hf_config: Any, dtype: torch.dtype, device: torch.device) -> None:
        config = linear_attention_config(hf_config, interleaved=True)
        moe = shared_moe(hf_config, renormalize=bool(hf_config.norm_topk_prob))
        super().__init__(config, moe, SHARED_NAMES, sparse_layers(hf_config), dtype, device)


class Qwen3_5ForCausalLM(DenseCausalLM):
    """Layers of Qwen3-Next, whose checkpoints hold their projections apart."""

    draft_prefix = "mtp."

    def __init__(self, hf_config: Any, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(linear_attention_config(hf_config, interleaved=False), dtype, device)


class Qwen3_5MoeForCausalLM(MoeCausalLM):
    """The same with experts in all layers."""

    draft_prefix = "mtp."

    def __init__(self, hf_config: Any, dtype: torch.dtype, device: torch.device) -> None:
        config = linear_attention_config(hf_config, interleaved=False)
        moe = shared_moe(hf_config, renormalize=True)
        super().__init__(config, moe, SHARED_NAMES, range(config.num_layers), dtype, device)


def linear_attention_config(hf_config: Any, *, interleaved: bool) -> DenseConfig:
    """Sizes of a decoder whose layers have linear attention, or attention with output gates.

    Raises ConfigurationError for other types of layers, and for heads that do not fit together.
    """
    types = list(hf_config.layer_types)
    if unknown := set(types) - {FULL, LINEAR}:
        raise ConfigurationError(
            f"layer type {min(unknown)!r} is not supported; supported are {FULL} and {LINEAR}"
        )
    if FULL not in types:
        raise ConfigurationError(f"layer_types: expected one {FULL} or more")
    if not getattr(hf_config, "attn_output_gate", True):
        raise ConfigurationError("attn_output_gate: expected true, the layers that there are")
    if hf_config.linear_conv_kernel_dim < 2:
        raise ConfigurationError("linear_conv_kernel_dim: expected 2 or more")
    num_k_heads, num_v_heads = hf_config.linear_num_key_heads, hf_config.linear_num_value_heads
    if num_v_heads % num_k_heads:
        raise ConfigurationError(
            f"linear_num_value_heads: expected a multiple of the {num_k_heads} key heads, got {num_v_heads}"
        )
    delta = DeltaConfig(
        num_k_heads=num_k_heads,
        num_v_heads=num_v_heads,
        k_dim=hf_config.linear_key_head_dim,
        v_dim=hf_config.linear_value_head_dim,
        conv_size=hf_config.linear_conv_kernel_dim,
        norm_eps=hf_config.rms_norm_eps,
        interleaved=interleaved,
    )
    return dense_config(
        hf_config,
        types=[FULL] * len(types),
        **attention_biases(hf_config),
        qk_norm=True,
        norm_offset=1.0,
        output_gate=True,
        delta=delta,
        linear_layers=tuple(layer for layer, name in enumerate(types) if name == LINEAR),
    )


def inside(model_class: type[DenseCausalLM]) -> type[DenseCausalLM]:
    """The text model inside one for images and text: other names, and a vision tower that is ignored."""

    class Inside(model_class):  # type: ignore[valid-type,misc]
        def checkpoint_map(self) -> WeightMap:
            return {_inside(name): target for name, target in super().checkpoint_map().items()}

        def joint_map(self) -> WeightMap:
            return {_inside(name): target for name, target in super().joint_map().items()}

        def stored_as(self, name: str) -> str:
            return _inside(super().stored_as(name))

        def ignored(self, name: str) -> bool:
            return name.startswith("model.visual.") or super().ignored(name)

    return Inside


Qwen3_5ForConditionalGeneration = inside(Qwen3_5ForCausalLM)
Qwen3_5MoeForConditionalGeneration = inside(Qwen3_5MoeForCausalLM)


def _inside(name: str) -> str:
    outer, inner = "model.", "model.language_model."
    return inner + name.removeprefix(outer) if name.startswith(outer) and not name.startswith(inner) else name
