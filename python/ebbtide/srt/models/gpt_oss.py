"""gpt-oss: sinks, windows in every second layer, and experts with biases and a clamped gate."""

from typing import Any

import torch

from ebbtide.srt.layers.attention.base import LayerAttention
from ebbtide.srt.layers.heads import Clamp, MoeConfig
from ebbtide.srt.models.base import Split, WeightMap, WeightTarget, stacked
from ebbtide.srt.models.dense import Attention, attention_biases, dense_config
from ebbtide.srt.models.moe import MoeCausalLM

# Defaults, since the configs of some versions of transformers lack these fields.
_SLOPE, _LIMIT = 1.702, 7.0


class GptOssForCausalLM(MoeCausalLM):
    """The weights of a token's experts sum to one; every product has a bias."""

    def __init__(self, hf_config: Any, dtype: torch.dtype, device: torch.device) -> None:
        config = dense_config(hf_config, **attention_biases(hf_config), sinks=True)
        clamp = Clamp(getattr(hf_config, "swiglu_alpha", _SLOPE), getattr(hf_config, "swiglu_limit", _LIMIT))
        moe = MoeConfig(
            num_experts=hf_config.num_local_experts,
            num_experts_per_token=hf_config.num_experts_per_tok,
            inner_size=hf_config.intermediate_size,
            renormalize=True,
            clamp=clamp,
        )
        super().__init__(config, moe, None, range(config.num_layers), dtype, device)

    @property
    def attention_layers(self) -> list[LayerAttention]:
        return [part.layer_attention for part in self.modules() if isinstance(part, Attention)]

    def expert_map(self) -> WeightMap:
        num_experts, inner, hidden = self.moe.num_experts, self.moe.inner_size, self.config.hidden_size
        rows = stacked("mlp.gate.weight", {"mlp.router.weight": num_experts}, hidden)
        rows |= stacked("mlp.gate.bias", {"mlp.router.bias": num_experts})
        # The shape for one expert, and the dimension that ranks divide, that of inner numbers; None: none.
        experts: dict[str, tuple[tuple[int, ...], int | None]] = {
            "gate_up_proj": ((hidden, 2 * inner), 2),
            "gate_up_proj_bias": ((2 * inner,), 1),
            "down_proj": ((inner, hidden), 1),
            "down_proj_bias": ((hidden,), None),
        }
        for part, (shape, dim) in experts.items():
            name = f"mlp.experts.{part}"
            split = None if dim is None else Split(dim, inner, "intermediate_size of the experts")
            rows[name] = WeightTarget(name, 0, num_experts, (num_experts, *shape), split)
        return rows
