"""Phi-3 and Phi-4, whose checkpoints hold fused projections."""

from typing import Any

import torch

from ebbtide.srt.models.base import OUTPUTS, Split, WeightMap, divided, projection
from ebbtide.srt.models.dense import DenseCausalLM, alike, dense_config, dense_layer_map


class Phi3ForCausalLM(DenseCausalLM):
    """Llama's layers, all with a window if the config says so."""

    def __init__(self, hf_config: Any, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dense_config(hf_config, types=alike(hf_config)), dtype, device)

    def layer_map(self, layer: int) -> WeightMap:
        config = self.config
        qkv, gate_up = config.q_size + 2 * config.kv_size, 2 * config.intermediate_size
        separate = ("self_attn.qkv_proj.", "mlp.gate_up_proj.")
        rows = {
            name: target
            for name, target in dense_layer_map(config).items()
            if not target.parameter.startswith(separate)
        }
        for module, size in (("self_attn.qkv_proj", qkv), ("mlp.gate_up_proj", gate_up)):
            rows |= projection(module, {module: size}, config.hidden_size, bias=False)
        # A rank's part of these is several runs of rows: no rank takes a part.
        return divided(
            rows,
            {
                module: Split(OUTPUTS, 1, f"ranks that hold {module} of Phi-3")
                for module in ("self_attn.qkv_proj", "mlp.gate_up_proj")
            },
        )
