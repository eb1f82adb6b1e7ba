"""GLM-4.5, 4.6 and 4.7."""

from typing import Any

import torch

from ebbtide.srt.layers.moe import MoeConfig
from ebbtide.srt.models.dense import dense_config
from ebbtide.srt.models.moe import ExpertNames, MoeCausalLM, is_behind_layers


class Glm4MoeForCausalLM(MoeCausalLM):
    """A part of each head is rotated; behind the first layers, experts are chosen by sigmoids and a bias."""

    def __init__(self, hf_config: Any, dtype: torch.dtype, device: torch.device) -> None:
        config = dense_config(
            hf_config, qkv_bias=bool(hf_config.attention_bias), qk_norm=bool(hf_config.use_qk_norm)
        )
        moe = MoeConfig(
            num_experts=hf_config.n_routed_experts,
            num_experts_per_token=hf_config.num_experts_per_tok,
            inner_size=hf_config.moe_intermediate_size,
            renormalize=bool(hf_config.norm_topk_prob),
            scoring="sigmoid",
            has_bias=True,
            num_groups=hf_config.n_group,
            num_kept_groups=hf_config.topk_group,
            scale=hf_config.routed_scaling_factor,
            shared_size=hf_config.moe_intermediate_size * hf_config.n_shared_experts,
        )
        names = ExpertNames("mlp", gate="gate_proj", up="up_proj", down="down_proj")
        layers = range(hf_config.first_k_dense_replace, config.num_layers)
        super().__init__(config, moe, names, layers, dtype, device)

    def ignored(self, name: str) -> bool:
        return super().ignored(name) or is_behind_layers(name, self.config.num_layers)
