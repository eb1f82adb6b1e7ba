"""Qwen3.5 and later with the same layers, dense and with experts, as text models.

Checkpoints for images and text hold a vision tower too, which is ignored.
"""

from typing import Any

import torch

from ebbtide.srt.models.base import WeightMap
from ebbtide.srt.models.dense import DenseCausalLM
from ebbtide.srt.models.moe import MoeCausalLM
from ebbtide.srt.models.qwen3_next import EXPERT_NAMES, hybrid_config, shared_moe


class Qwen3_5ForCausalLM(DenseCausalLM):
    """Layers of Qwen3-Next, whose checkpoints hold their projections apart."""

    def __init__(self, hf_config: Any, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(hybrid_config(hf_config, interleaved=False), dtype, device)

    def ignored(self, name: str) -> bool:
        return super().ignored(name) or name.startswith("mtp.")


class Qwen3_5MoeForCausalLM(MoeCausalLM):
    """The same with experts in all layers."""

    def __init__(self, hf_config: Any, dtype: torch.dtype, device: torch.device) -> None:
        config = hybrid_config(hf_config, interleaved=False)
        moe = shared_moe(hf_config, renormalize=True)
        super().__init__(config, moe, EXPERT_NAMES, range(config.num_layers), dtype, device)

    def ignored(self, name: str) -> bool:
        return super().ignored(name) or name.startswith("mtp.")


def inside(model_class: type[DenseCausalLM]) -> type[DenseCausalLM]:
    """The text model inside one for images and text: other names, and a vision tower that is ignored."""

    class Inside(model_class):  # type: ignore[valid-type,misc]
        def checkpoint_map(self) -> WeightMap:
            return {_inside(name): target for name, target in super().checkpoint_map().items()}

        def joint_map(self) -> WeightMap:
            return {_inside(name): target for name, target in super().joint_map().items()}

        def stored_as(self, name: str) -> str:
            return _inside(super().stored_as(name))

        def ignored(self, name: str) -> bool:
            return name.startswith("model.visual.") or super().ignored(name)

    return Inside


Qwen3_5ForConditionalGeneration = inside(Qwen3_5ForCausalLM)
Qwen3_5MoeForConditionalGeneration = inside(Qwen3_5MoeForCausalLM)


def _inside(name: str) -> str:
    outer, inner = "model.", "model.language_model."
    return inner + name.removeprefix(outer) if name.startswith(outer) and not name.startswith(inner) else name
