"""GLM-4.7-Flash."""

from typing import Any

import torch

from ebbtide.srt.errors import ConfigurationError
from ebbtide.srt.models.deepseek import sigmoid_experts
from ebbtide.srt.models.latent import LatentMoeCausalLM


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
