"""Llama 2 and 3, and variants with sliding windows: Mistral, Mixtral, Phi-3 and Phi-4."""

from typing import Any

import torch

from ebbtide.srt.layers.heads import MoeConfig
from ebbtide.srt.models.base import OUTPUTS, Split, WeightMap, projection
from ebbtide.srt.models.dense import DenseCausalLM, alike, attention_biases, dense_config, dense_layer_map
from ebbtide.srt.models.moe import ExpertNames, MoeCausalLM


class LlamaForCausalLM(DenseCausalLM):
    """Products have biases only if the config asks for them."""

    def __init__(self, hf_config: Any, dtype: torch.dtype, device: torch.device) -> None:
        mlp_bias = bool(getattr(hf_config, "mlp_bias", False))
        config = dense_config(hf_config, **attention_biases(hf_config), mlp_bias=mlp_bias)
        super().__init__(config, dtype, device)


class MistralForCausalLM(DenseCausalLM):
    """Llama's layers, all with a sliding window if the config has one."""

    def __init__(self, hf_config: Any, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dense_config(hf_config, types=alike(hf_config)), dtype, device)


class MixtralForCausalLM(MoeCausalLM):
    """Mistral's attention; every layer has experts, and a token's expert weights sum to one."""

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


class Phi3ForCausalLM(MistralForCausalLM):
    """Mistral's layers. Checkpoints hold fused projections."""

    def layer_map(self, layer: int) -> WeightMap:
        config = self.config
        sizes = {
            "self_attn.qkv_proj": config.q_size + 2 * config.kv_size,
            "mlp.gate_up_proj": 2 * config.intermediate_size,
        }
        rows = {
            name: target
            for name, target in dense_layer_map(config).items()
            if target.parameter.removesuffix(".weight") not in sizes
        }
        for module, size in sizes.items():
            # A rank's part would be several ranges of rows, so tensor parallelism is refused.
            whole = Split(OUTPUTS, 1, f"ranks that hold {module} of Phi-3")
            rows |= projection(module, {module: size}, config.hidden_size, split=whole)
        return rows
