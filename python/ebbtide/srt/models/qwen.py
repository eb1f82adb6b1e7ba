"""Qwen1.5 to Qwen3, dense and with a mixture of experts, and MiMo."""

from typing import Any

import torch

from ebbtide.srt.layers.heads import MoeConfig
from ebbtide.srt.models.dense import DenseCausalLM, alike, attention_biases, dense_config
from ebbtide.srt.models.moe import ExpertNames, MoeCausalLM

SHARED_NAMES = ExpertNames(shared="shared_expert")


class Qwen2ForCausalLM(DenseCausalLM):
    """q, k and v always have biases; the other projections never have."""

    def __init__(self, hf_config: Any, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dense_config(hf_config, qkv_bias=True), dtype, device)


class Qwen3ForCausalLM(DenseCausalLM):
    """Queries and keys are normalised per head before the rotation."""

    def __init__(self, hf_config: Any, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dense_config(hf_config, **attention_biases(hf_config), qk_norm=True), dtype, device)


class MiMoForCausalLM(Qwen2ForCausalLM):
    """Qwen2's decoder. Transformers has none of this name: its config is read as Qwen2's."""

    draft_prefix = "model.mtp_layers."


class Qwen2MoeForCausalLM(MoeCausalLM):
    """Qwen2's attention; besides its experts every token takes an MLP with a gate of its own."""

    def __init__(self, hf_config: Any, dtype: torch.dtype, device: torch.device) -> None:
        moe = shared_moe(hf_config, renormalize=bool(hf_config.norm_topk_prob))
        config = dense_config(hf_config, qkv_bias=bool(hf_config.qkv_bias))
        super().__init__(config, moe, SHARED_NAMES, sparse_layers(hf_config), dtype, device)


class Qwen3MoeForCausalLM(MoeCausalLM):
    """Qwen3's attention; every `decoder_sparse_step`th layer has experts, save those the config excepts."""

    def __init__(self, hf_config: Any, dtype: torch.dtype, device: torch.device) -> None:
        config = dense_config(hf_config, types=alike(hf_config), **attention_biases(hf_config), qk_norm=True)
        moe = moe_config(hf_config, renormalize=bool(hf_config.norm_topk_prob))
        super().__init__(config, moe, ExpertNames(), sparse_layers(hf_config), dtype, device)


def sparse_layers(hf_config: Any) -> list[int]:
    """The layers with experts."""
    step = hf_config.decoder_sparse_step
    return [
        layer
        for layer in range(hf_config.num_hidden_layers)
        if (layer + 1) % step == 0 and layer not in (hf_config.mlp_only_layers or ())
    ]


def moe_config(hf_config: Any, **fields: Any) -> MoeConfig:
    """Experts chosen by softmax; `fields` are further ones of `MoeConfig`."""
    return MoeConfig(
        num_experts=hf_config.num_experts,
        num_experts_per_token=hf_config.num_experts_per_tok,
        inner_size=hf_config.moe_intermediate_size,
        **fields,
    )


def shared_moe(hf_config: Any, *, renormalize: bool) -> MoeConfig:
    """Experts, and an MLP with a gate of its own that every token takes too."""
    shared_size = hf_config.shared_expert_intermediate_size
    return moe_config(hf_config, renormalize=renormalize, shared_size=shared_size, gates_shared=True)
