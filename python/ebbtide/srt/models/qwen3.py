"""Qwen3, dense."""

from typing import Any

import torch

from ebbtide.srt.models.dense import DenseCausalLM, dense_config


class Qwen3ForCausalLM(DenseCausalLM):
    """Queries and keys are normalised per head before the rotation."""

    def __init__(self, hf_config: Any, dtype: torch.dtype, device: torch.device) -> None:
        attention_bias = bool(getattr(hf_config, "attention_bias", False))
        config = dense_config(hf_config, qkv_bias=attention_bias, output_bias=attention_bias, qk_norm=True)
        super().__init__(config, dtype, device)
