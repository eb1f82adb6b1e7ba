"""Qwen1.5 and Qwen2 with a mixture of experts."""

from typing import Any

import torch

from ebbtide.srt.layers.moe import MoeConfig
from ebbtide.srt.models.dense import dense_config
from ebbtide.srt.models.moe import ExpertNames, MoeCausalLM
from ebbtide.srt.models.qwen3_moe import sparse_layers


class Qwen2MoeForCausalLM(MoeCausalLM):
    """Qwen2's attention; besides its experts every token takes an MLP with a gate of its own."""

    def __init__(self, hf_config: Any, dtype: torch.dtype, device: torch.device) -> None:
        moe = MoeConfig(
            num_experts=hf_config.num_experts,
            num_experts_per_token=hf_config.num_experts_per_tok,
            inner_size=hf_config.moe_intermediate_size,
            renormalize=bool(hf_config.norm_topk_prob),
            shared_size=hf_config.shared_expert_intermediate_size,
            gates_shared=True,
        )
        names = ExpertNames("mlp", gate="gate_proj", up="up_proj", down="down_proj", shared="shared_expert")
        config = dense_config(hf_config, qkv_bias=bool(hf_config.qkv_bias))
        super().__init__(config, moe, names, sparse_layers(hf_config), dtype, device)
