"""GLM-4.5, 4.6, 4.7 and 4.7-Flash."""

from typing import Any

import torch

from ebbtide.srt.errors import ConfigurationError
from ebbtide.srt.models.deepseek import sigmoid_experts
from ebbtide.srt.models.dense import dense_config
from ebbtide.srt.models.latent import LatentMoeCausalLM
from ebbtide.srt.models.moe import ExpertNames, MoeCausalLM, is_behind_layers


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
