"""Gemma 3, text only: queries and keys are normalised; layers with windows have a rotation of their own."""

from typing import Any

import torch

from ebbtide.srt.errors import ConfigurationError
from ebbtide.srt.layers.rotary import rope_from
from ebbtide.srt.models.gemma2 import GemmaCausalLM, gemma_config


class Gemma3ForCausalLM(GemmaCausalLM):
    """Most layers see a window; every sixth sees everything, with a rotation for long contexts."""

    def __init__(self, hf_config: Any, dtype: torch.dtype, device: torch.device) -> None:
        if hf_config.attn_logit_softcapping is not None:
            raise ConfigurationError("attn_logit_softcapping is not supported in Gemma 3; it must be null")
        ropes = {name: rope_from(settings) for name, settings in hf_config.rope_parameters.items()}
        config = gemma_config(hf_config, None, qk_norm=True, ropes=ropes)
        super().__init__(config, hf_config, dtype, device)
