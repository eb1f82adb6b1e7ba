"""Llama 2 and 3, and what is shaped like them."""

from typing import Any

import torch

from ebbtide.srt.models.dense import DenseCausalLM, dense_config


class LlamaForCausalLM(DenseCausalLM):
    """Biases only where the config asks for them."""

    def __init__(self, hf_config: Any, dtype: torch.dtype, device: torch.device) -> None:
        attention_bias = bool(getattr(hf_config, "attention_bias", False))
        config = dense_config(
            hf_config,
            qkv_bias=attention_bias,
            output_bias=attention_bias,
            mlp_bias=bool(getattr(hf_config, "mlp_bias", False)),
        )
        super().__init__(config, dtype, device)
