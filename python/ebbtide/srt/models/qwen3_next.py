"""Qwen3-Next: most layers have linear attention by the gated delta rule, and all of them experts."""

from typing import Any

import torch

from ebbtide.srt.errors import ConfigurationError
from ebbtide.srt.layers.gated_delta_net import DeltaConfig
from ebbtide.srt.layers.moe import MoeConfig
from ebbtide.srt.models.dense import FULL, DenseConfig, dense_config
from ebbtide.srt.models.moe import ExpertNames, MoeCausalLM
from ebbtide.srt.models.qwen3_moe import sparse_layers

LINEAR = "linear_attention"
EXPERT_NAMES = ExpertNames("mlp", gate="gate_proj", up="up_proj", down="down_proj", shared="shared_expert")


class Qwen3NextForCausalLM(MoeCausalLM):
    """What drafts several tokens ahead is ignored."""

    def __init__(self, hf_config: Any, dtype: torch.dtype, device: torch.device) -> None:
        config = hybrid_config(hf_config, interleaved=True)
        moe = shared_moe(hf_config, renormalize=bool(hf_config.norm_topk_prob))
        super().__init__(config, moe, EXPERT_NAMES, sparse_layers(hf_config), dtype, device)

    def ignored(self, name: str) -> bool:
        return super().ignored(name) or name.startswith("mtp.")


def hybrid_config(hf_config: Any, *, interleaved: bool) -> DenseConfig:
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
    bias = bool(getattr(hf_config, "attention_bias", False))
    return dense_config(
        hf_config,
        types=[FULL] * len(types),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        norm_offset=1.0,
        output_gate=True,
        delta=delta,
        linear_layers=tuple(layer for layer, name in enumerate(types) if name == LINEAR),
    )


def shared_moe(hf_config: Any, *, renormalize: bool) -> MoeConfig:
    """Experts beside an MLP with a gate of its own, which every token takes."""
    return MoeConfig(
        num_experts=hf_config.num_experts,
        num_experts_per_token=hf_config.num_experts_per_tok,
        inner_size=hf_config.moe_intermediate_size,
        renormalize=renormalize,
        shared_size=hf_config.shared_expert_intermediate_size,
        gates_shared=True,
    )
