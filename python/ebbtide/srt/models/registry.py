"""Architecture name of config.json → model class."""

from collections.abc import Callable
from typing import Any

import torch

from ebbtide.srt.errors import ConfigurationError
from ebbtide.srt.models.base import CausalLM
from ebbtide.srt.models.deepseek import DeepseekV2ForCausalLM, DeepseekV3ForCausalLM
from ebbtide.srt.models.gemma2 import Gemma2ForCausalLM
from ebbtide.srt.models.gemma3 import Gemma3ForCausalLM
from ebbtide.srt.models.glm4_moe import Glm4MoeForCausalLM
from ebbtide.srt.models.glm4_moe_lite import Glm4MoeLiteForCausalLM
from ebbtide.srt.models.gpt_oss import GptOssForCausalLM
from ebbtide.srt.models.llama import LlamaForCausalLM
from ebbtide.srt.models.mistral import MistralForCausalLM
from ebbtide.srt.models.mixtral import MixtralForCausalLM
from ebbtide.srt.models.phi3 import Phi3ForCausalLM
from ebbtide.srt.models.qwen2 import Qwen2ForCausalLM
from ebbtide.srt.models.qwen2_moe import Qwen2MoeForCausalLM
from ebbtide.srt.models.qwen3 import Qwen3ForCausalLM
from ebbtide.srt.models.qwen3_moe import Qwen3MoeForCausalLM

MODELS: dict[str, Callable[[Any, torch.dtype, torch.device], CausalLM]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
    "Qwen3MoeForCausalLM": Qwen3MoeForCausalLM,
    "Qwen2MoeForCausalLM": Qwen2MoeForCausalLM,
    "Glm4MoeForCausalLM": Glm4MoeForCausalLM,
    "Glm4MoeLiteForCausalLM": Glm4MoeLiteForCausalLM,
    "DeepseekV2ForCausalLM": DeepseekV2ForCausalLM,
    "DeepseekV3ForCausalLM": DeepseekV3ForCausalLM,
    "GptOssForCausalLM": GptOssForCausalLM,
    "MistralForCausalLM": MistralForCausalLM,
    "MixtralForCausalLM": MixtralForCausalLM,
    "Phi3ForCausalLM": Phi3ForCausalLM,
    "Gemma2ForCausalLM": Gemma2ForCausalLM,
    "Gemma3ForCausalLM": Gemma3ForCausalLM,
}


def build_model(
    architecture: str, hf_config: Any, dtype: torch.dtype, device: torch.device, impl: str = "auto"
) -> CausalLM:
    """The model with its parameters on the meta device and its buffers on `device`.

    Args:
        impl: "auto": ours, or transformers' where there is none; "transformers".

    Raises ConfigurationError for an unknown architecture or a setting that is not supported.
    """
    if architecture in MODELS and impl == "auto":
        return MODELS[architecture](hf_config, dtype, device)
    from ebbtide.srt.models.from_transformers import TransformersCausalLM  # seconds of imports

    try:
        return TransformersCausalLM(architecture, hf_config, dtype, device)
    except ConfigurationError as error:
        if architecture in MODELS:
            raise
        raise ConfigurationError(
            f"architecture {architecture!r} is not supported; supported are {', '.join(MODELS)}, and others "
            f"as transformers has them: {error}"
        ) from error
