"""Qwen2, Qwen2.5, Qwen3 and MiMo, dense."""

from typing import Any

import torch

from ebbtide.srt.models.dense import DenseCausalLM, dense_config


class Qwen2ForCausalLM(DenseCausalLM):
    """q, k and v always have biases; the other projections never have."""

    def __init__(self, hf_config: Any, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dense_config(hf_config, qkv_bias=True), dtype, device)


class Qwen3ForCausalLM(DenseCausalLM):
    """Queries and keys are normalised per head before the rotation."""

    def __init__(self, hf_config: Any, dtype: torch.dtype, device: torch.device) -> None:
        attention_bias = bool(getattr(hf_config, "attention_bias", False))
        config = dense_config(hf_config, qkv_bias=attention_bias, output_bias=attention_bias, qk_norm=True)
        super().__init__(config, dtype, device)


class MiMoForCausalLM(Qwen2ForCausalLM):
    """Qwen2's decoder. Transformers has none of this name: its config is read as Qwen2's."""

    draft_prefix = "model.mtp_layers."
