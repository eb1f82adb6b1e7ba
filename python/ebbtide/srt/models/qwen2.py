"""Qwen2 and Qwen2.5, dense."""

from typing import Any

import torch

from ebbtide.srt.models.dense import DenseCausalLM, dense_config


class Qwen2ForCausalLM(DenseCausalLM):
    """q, k and v always have biases; the other projections never have."""

    def __init__(self, hf_config: Any, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dense_config(hf_config, qkv_bias=True), dtype, device)
