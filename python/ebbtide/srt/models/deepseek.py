"""DeepSeek-V2 and V3, and what is built of the same parts: R1, Kimi-K2, Moonlight, GLM-4.5 to 4.7."""

from dataclasses import replace
from typing import Any

import torch

from ebbtide.srt.errors import ConfigurationError
from ebbtide.srt.layers.heads import MoeConfig
from ebbtide.srt.models.dense import dense_config
from ebbtide.srt.models.latent import LatentMoeCausalLM
from ebbtide.srt.models.moe import ExpertNames, MoeCausalLM, is_behind_layers


class DeepseekV2ForCausalLM(LatentMoeCausalLM):
    """Experts by softmax, in V2 of the best groups alone, which are those with the best expert."""

    def __init__(self, hf_config: Any, dtype: torch.dtype, device: torch.device) -> None:
        method = require(hf_config, "topk_method", "greedy", "group_limited_greedy")
        require(hf_config, "scoring_func", "softmax")
        require(hf_config, "norm_topk_prob", False)
        moe = grouped_moe(hf_config, renormalize=False, num_group_scores=1, has_wide_router=True)
        if method == "greedy":
            moe = replace(moe, num_groups=1, num_kept_groups=1)
        super().__init__(hf_config, moe, layers_after_dense(hf_config), dtype, device)


class DeepseekV3ForCausalLM(LatentMoeCausalLM):
    """Experts by sigmoids and a bias."""

    def __init__(self, hf_config: Any, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(hf_config, sigmoid_experts(hf_config), layers_after_dense(hf_config), dtype, device)


class Glm4MoeForCausalLM(MoeCausalLM):
    """A part of each head is rotated; behind the first layers, experts are chosen by sigmoids and a bias."""

    def __init__(self, hf_config: Any, dtype: torch.dtype, device: torch.device) -> None:
        config = dense_config(
            hf_config, qkv_bias=bool(hf_config.attention_bias), qk_norm=bool(hf_config.use_qk_norm)
        )
        layers = range(hf_config.first_k_dense_replace, config.num_layers)
        super().__init__(config, sigmoid_experts(hf_config), ExpertNames(), layers, dtype, device)

    def ignored(self, name: str) -> bool:
        return super().ignored(name) or is_behind_layers(name, self.config.num_layers)


class Glm4MoeLiteForCausalLM(LatentMoeCausalLM):
    """DeepSeek-V3's layers; which of them have experts is said layer by layer."""

    def __init__(self, hf_config: Any, dtype: torch.dtype, device: torch.device) -> None:
        types = hf_config.mlp_layer_types
        if unknown := set(types) - {"dense", "sparse"}:
            raise ConfigurationError(
                f"mlp_layer_types {min(unknown)!r} is not supported; supported are dense and sparse"
            )
        sparse = [layer for layer, name in enumerate(types) if name == "sparse"]
        super().__init__(hf_config, sigmoid_experts(hf_config), sparse, dtype, device)


def sigmoid_experts(hf_config: Any) -> MoeConfig:
    """Experts chosen by sigmoids and a bias for each, within the best groups.

    Raises ConfigurationError where they are chosen otherwise.
    """
    require(hf_config, "topk_method", "noaux_tc")
    require(hf_config, "scoring_func", "sigmoid")
    renormalize = bool(hf_config.norm_topk_prob)
    return grouped_moe(hf_config, renormalize=renormalize, scoring="sigmoid", has_bias=True)


def grouped_moe(hf_config: Any, **fields: Any) -> MoeConfig:
    """Experts in groups, and an MLP for all tokens; `fields` are further ones of `MoeConfig`."""
    return MoeConfig(
        num_experts=hf_config.n_routed_experts,
        num_experts_per_token=hf_config.num_experts_per_tok or 0,
        inner_size=hf_config.moe_intermediate_size,
        num_groups=hf_config.n_group or 1,
        num_kept_groups=hf_config.topk_group or 1,
        scale=hf_config.routed_scaling_factor,
        shared_size=hf_config.moe_intermediate_size * (hf_config.n_shared_experts or 0),
        **fields,
    )


def layers_after_dense(hf_config: Any) -> range:
    """The layers after the first dense ones.

    Raises ConfigurationError where only some of those have experts.
    """
    require(hf_config, "moe_layer_freq", 1)
    return range(hf_config.first_k_dense_replace or 0, hf_config.num_hidden_layers)


def require(hf_config: Any, field: str, *supported: Any) -> Any:
    """The field's value, the first of the supported ones where the config has none.

    Raises ConfigurationError for any other.
    """
    value = getattr(hf_config, field, None)
    if value is None:
        return supported[0]
    if value not in supported:
        expected = " or ".join(map(repr, supported))
        raise ConfigurationError(f"{field} {value!r} is not supported; expected {expected}")
    return value
