"""Mixtral."""

from typing import Any

import torch

from ebbtide.srt.layers.moe import MoeConfig
from ebbtide.srt.models.dense import alike, dense_config
from ebbtide.srt.models.moe import ExpertNames, MoeCausalLM


class MixtralForCausalLM(MoeCausalLM):
    """Llama's attention; every layer has experts, and a token's expert weights sum to one."""

    def __init__(self, hf_config: Any, dtype: torch.dtype, device: torch.device) -> None:
        moe = MoeConfig(
            num_experts=hf_config.num_local_experts,
            num_experts_per_token=hf_config.num_experts_per_tok,
            inner_size=hf_config.intermediate_size,
            renormalize=True,
        )
        names = ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2")
        layers = range(hf_config.num_hidden_layers)
        super().__init__(dense_config(hf_config, types=alike(hf_config)), moe, names, layers, dtype, device)
