"""Gemma 2 and 3, text only: windows in most layers, and norms before and after attention and MLP.

Shapes: T tokens, D hidden, V vocabulary, M rows that are wanted.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ebbtide.srt.errors import ConfigurationError
from ebbtide.srt.layers.heads import AttentionKind, Rope
from ebbtide.srt.layers.norm import Residual
from ebbtide.srt.layers.rotary import rope_from
from ebbtide.srt.layers.step import Kernels, Step
from ebbtide.srt.models.base import WeightMap
from ebbtide.srt.models.dense import (
    Block,
    DenseCausalLM,
    DenseConfig,
    attention_biases,
    dense_config,
    dense_layer_map,
)


class GemmaBlock(Block):
    """One decoder layer. Outputs of attention and MLP are normalised before they are added."""

    def __init__(self, config: DenseConfig, dtype: torch.dtype, layer: int) -> None:
        super().__init__(config, dtype, layer)
        self.pre_feedforward_layernorm = config.norm(dtype)
        self.post_feedforward_layernorm = config.norm(dtype)

    def forward(self, x: Residual, rope: Rope, step: Step, wanted_M: Tensor | None = None) -> None:
        attended = self.self_attn(x.normed(self.input_layernorm), rope, step)
        x.add(self.post_attention_layernorm(attended))
        x.keep(wanted_M)
        transformed = self.mlp(x.normed(self.pre_feedforward_layernorm), step)
        x.add(self.post_feedforward_layernorm(transformed))


class GemmaCausalLM(DenseCausalLM):
    """The decoder of Gemma 2 and 3.

    Args:
        config: sizes and switches.
        hf_config: the model's config, for the soft cap of logits.
        dtype, device: as for `DenseCausalLM`.
    """

    def __init__(self, config: DenseConfig, hf_config: Any, dtype: torch.dtype, device: torch.device) -> None:
        if getattr(hf_config, "use_bidirectional_attention", None):
            raise ConfigurationError("use_bidirectional_attention is not supported; it must be false")
        super().__init__(config, dtype, device, partial(GemmaBlock, config, dtype))
        self._logit_cap = hf_config.final_logit_softcapping

    def logits(self, hidden_TD: Tensor, kernels: Kernels) -> Tensor:
        logits_TV = super().logits(hidden_TD, kernels)
        if self._logit_cap is not None:
            logits_TV.div_(self._logit_cap).tanh_().mul_(self._logit_cap)
        return logits_TV

    def layer_map(self, layer: int) -> WeightMap:
        return dense_layer_map(self.config, ("pre_feedforward_layernorm", "post_feedforward_layernorm"))


def gemma_config(hf_config: Any, soft_cap: float | None, **switches: Any) -> DenseConfig:
    """The settings that both share: norm weights are offsets from one, and embeddings are scaled."""
    return dense_config(
        hf_config,
        kind=AttentionKind(hf_config.query_pre_attn_scalar**-0.5, soft_cap=soft_cap),
        norm_offset=1.0,
        embedding_scale=hf_config.hidden_size**0.5,
        **attention_biases(hf_config),
        **switches,
    )


class Gemma2ForCausalLM(GemmaCausalLM):
    """Attention scores and logits have soft caps."""

    def __init__(self, hf_config: Any, dtype: torch.dtype, device: torch.device) -> None:
        config = gemma_config(hf_config, hf_config.attn_logit_softcapping)
        super().__init__(config, hf_config, dtype, device)


class Gemma3ForCausalLM(GemmaCausalLM):
    """Queries and keys are normalised; layers with windows have their own rotary embedding."""

    def __init__(self, hf_config: Any, dtype: torch.dtype, device: torch.device) -> None:
        if hf_config.attn_logit_softcapping is not None:
            raise ConfigurationError("attn_logit_softcapping is not supported in Gemma 3; it must be null")
        ropes = {name: rope_from(settings) for name, settings in hf_config.rope_parameters.items()}
        config = gemma_config(hf_config, None, qk_norm=True, ropes=ropes)
        super().__init__(config, hf_config, dtype, device)
