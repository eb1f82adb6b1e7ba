"""Mistral."""

from typing import Any

import torch

from ebbtide.srt.models.dense import DenseCausalLM, alike, dense_config


class MistralForCausalLM(DenseCausalLM):
    """Llama's layers, all with a window if the config says so."""

    def __init__(self, hf_config: Any, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dense_config(hf_config, types=alike(hf_config)), dtype, device)
