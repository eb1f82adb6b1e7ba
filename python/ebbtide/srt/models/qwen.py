"""Qwen1.5 to Qwen3, dense and with a mixture of experts, MiMo, and Qwen3-Next to Qwen3.5 and later.

Most layers of Qwen3-Next and later have linear attention (gated delta rule). The checkpoints of models for
images and text also hold a vision tower, which is ignored.
"""

from typing import Any

import torch

from ebbtide.srt.errors import ConfigurationError
from ebbtide.srt.layers.gated_delta_net import DeltaConfig
from ebbtide.srt.layers.heads import MoeConfig
from ebbtide.srt.models.base import WeightMap
from ebbtide.srt.models.dense import FULL, DenseCausalLM, DenseConfig, alike, attention_biases, dense_config
from ebbtide.srt.models.moe import ExpertNames, MoeCausalLM

LINEAR = "linear_attention"
SHARED_NAMES = ExpertNames(shared="shared_expert")


class Qwen2ForCausalLM(DenseCausalLM):
    """Projections of queries, keys and values have biases; the others have none."""

    def __init__(self, hf_config: Any, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dense_config(hf_config, qkv_bias=True), dtype, device)


class Qwen3ForCausalLM(DenseCausalLM):
    """Queries and keys are normalised per head before the rotation."""

    def __init__(self, hf_config: Any, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dense_config(hf_config, **attention_biases(hf_config), qk_norm=True), dtype, device)


class MiMoForCausalLM(Qwen2ForCausalLM):
    """Qwen2's decoder. Transformers has no class of this name; the config is read as Qwen2's."""

    draft_prefix = "model.mtp_layers."


class Qwen2MoeForCausalLM(MoeCausalLM):
    """Qwen2's attention with experts, and a shared expert with its own gate for every token."""

    def __init__(self, hf_config: Any, dtype: torch.dtype, device: torch.device) -> None:
        moe = shared_moe(hf_config, renormalize=bool(hf_config.norm_topk_prob))
        config = dense_config(hf_config, qkv_bias=bool(hf_config.qkv_bias))
        super().__init__(config, moe, SHARED_NAMES, sparse_layers(hf_config), dtype, device)


class Qwen3MoeForCausalLM(MoeCausalLM):
    """Qwen3's attention; every `decoder_sparse_step`th layer has experts, except `mlp_only_layers`."""

    def __init__(self, hf_config: Any, dtype: torch.dtype, device: torch.device) -> None:
        config = dense_config(hf_config, types=alike(hf_config), **attention_biases(hf_config), qk_norm=True)
        moe = moe_config(hf_config, renormalize=bool(hf_config.norm_topk_prob))
        super().__init__(config, moe, ExpertNames(), sparse_layers(hf_config), dtype, device)


class Qwen3NextForCausalLM(MoeCausalLM):
    """Mostly linear attention; layers have experts as in `Qwen3MoeForCausalLM`, with a shared expert."""

    draft_prefix = "mtp."

    def __init__(self, hf_config: Any, dtype: torch.dtype, device: torch.device) -> None:
        config = linear_attention_config(hf_config, interleaved=True)
        moe = shared_moe(hf_config, renormalize=bool(hf_config.norm_topk_prob))
        super().__init__(config, moe, SHARED_NAMES, sparse_layers(hf_config), dtype, device)


class Qwen3_5ForCausalLM(DenseCausalLM):
    """Layers of Qwen3-Next with dense MLPs. Checkpoints hold the projections as separate tensors."""

    draft_prefix = "mtp."

    def __init__(self, hf_config: Any, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(linear_attention_config(hf_config, interleaved=False), dtype, device)


class Qwen3_5MoeForCausalLM(MoeCausalLM):
    """`Qwen3_5ForCausalLM` with experts in all layers."""

    draft_prefix = "mtp."

    def __init__(self, hf_config: Any, dtype: torch.dtype, device: torch.device) -> None:
        config = linear_attention_config(hf_config, interleaved=False)
        moe = shared_moe(hf_config, renormalize=True)
        super().__init__(config, moe, SHARED_NAMES, range(config.num_layers), dtype, device)


def sparse_layers(hf_config: Any) -> list[int]:
    """The layers with experts."""
    step = hf_config.decoder_sparse_step
    return [
        layer
        for layer in range(hf_config.num_hidden_layers)
        if (layer + 1) % step == 0 and layer not in (hf_config.mlp_only_layers or ())
    ]


def moe_config(hf_config: Any, **fields: Any) -> MoeConfig:
    """Experts chosen by softmax. `fields`: further ones of `MoeConfig`."""
    return MoeConfig(
        num_experts=hf_config.num_experts,
        num_experts_per_token=hf_config.num_experts_per_tok,
        inner_size=hf_config.moe_intermediate_size,
        **fields,
    )


def shared_moe(hf_config: Any, *, renormalize: bool) -> MoeConfig:
    """Experts, and a shared expert with its own gate that every token takes too."""
    shared_size = hf_config.shared_expert_intermediate_size
    return moe_config(hf_config, renormalize=renormalize, shared_size=shared_size, gates_shared=True)


def linear_attention_config(hf_config: Any, *, interleaved: bool) -> DenseConfig:
    """Read the sizes of a decoder whose layers have linear attention, or attention with output gates.

    Raises ConfigurationError: a layer has another type, or heads do not fit together.
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
    """The text model of one for images and text: tensors have other names, the vision tower is ignored."""

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
