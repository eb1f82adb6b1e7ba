"""Finds a model's class by the architecture name in config.json, and builds the model."""

from importlib import import_module
from typing import Any

import torch

from ebbtide.srt.errors import ConfigurationError
from ebbtide.srt.models.base import CausalLM

# Architecture, which is also the class's name → its module in `models`.
MODELS = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen",
    "Qwen3ForCausalLM": "qwen",
    "Qwen3MoeForCausalLM": "qwen",
    "Qwen2MoeForCausalLM": "qwen",
    "Glm4MoeForCausalLM": "deepseek",
    "Glm4MoeLiteForCausalLM": "deepseek",
    "DeepseekV2ForCausalLM": "deepseek",
    "DeepseekV3ForCausalLM": "deepseek",
    "GptOssForCausalLM": "gpt_oss",
    "MiMoForCausalLM": "qwen",
    "MistralForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
    "Phi3ForCausalLM": "llama",
    "Gemma2ForCausalLM": "gemma",
    "Gemma3ForCausalLM": "gemma",
    "Qwen3NextForCausalLM": "qwen",
    "NemotronHForCausalLM": "nemotron_h",
    "Qwen3_5ForCausalLM": "qwen",
    "Qwen3_5ForConditionalGeneration": "qwen",
    "Qwen3_5MoeForCausalLM": "qwen",
    "Qwen3_5MoeForConditionalGeneration": "qwen",
}


# Fields that change no result: of training, of unused outputs, of other parts of the engine, and those from
# which transformers computes `layer_types` and `sliding_window`. The last two lines are about training and
# computing Mamba-2, whose states are always float32 here.
_WITHOUT_EFFECT = """
_name_or_path architectures chunk_size_feed_forward dtype id2label label2id model_type output_attentions
output_hidden_states problem_type return_dict transformers_version
bos_token_id eos_token_id pad_token_id max_position_embeddings original_max_position_embeddings
attention_dropout aux_loss_alpha embd_pdrop hidden_dropout initializer_range num_mtp_layers
num_nextn_predict_layers output_router_logits pretraining_tp qk_head_dim resid_pdrop router_aux_loss_coef
router_jitter_noise use_cache
_sliding_window_pattern max_window_layers use_sliding_window
chunk_size expand mamba_ssm_cache_dtype moe_shared_expert_overlap mtp_layers_block_type num_logits_to_keep
rescale_prenorm_residual time_step_floor time_step_max time_step_min use_mamba_kernels
"""


class _Read:
    """A config that records which of its fields a model has read.

    A model honours or refuses each field that it reads, and can do neither with the others. So a field of
    transformers' config class that differs from its default must have been read, or be without effect.
    """

    def __init__(self, hf_config: Any) -> None:
        self._config, self._names = hf_config, set(_WITHOUT_EFFECT.split())

    def __getattr__(self, name: str) -> Any:
        other_names: dict[str, str] = getattr(self._config, "other_names", {})
        self._names.add(other_names.get(name, name))
        return getattr(self._config, name)

    def require_all(self, architecture: str) -> None:
        """Raises ConfigurationError for a field that differs from its default and was not read."""
        if unread := sorted(set(getattr(self._config, "changed_fields", ())) - self._names):
            value = getattr(self._config, unread[0])
            raise ConfigurationError(
                f"{architecture}: {unread[0]} {value!r} is not supported; expected its default"
            )


def build_model(
    architecture: str, hf_config: Any, dtype: torch.dtype, device: torch.device, impl: str = "auto"
) -> CausalLM:
    """Build a model with its parameters on the meta device and its buffers on `device`.

    Args:
        impl: "auto": our implementation, or transformers' if we have none; "transformers": theirs.

    Raises ConfigurationError: the architecture is unknown, or a setting is not supported.
    """
    if architecture in MODELS and impl == "auto":
        fields = _Read(hf_config)
        try:
            module = import_module(f"ebbtide.srt.models.{MODELS[architecture]}")
            model: CausalLM = getattr(module, architecture)(fields, dtype, device)
        except AttributeError as error:
            if error.obj is not hf_config:
                raise
            kind = getattr(hf_config, "model_type", None)
            raise ConfigurationError(
                f"{architecture}: expected {error.name} in the config, which model_type {kind!r} has not"
            ) from None
        fields.require_all(architecture)
        return model
    from ebbtide.srt.models.from_transformers import TransformersCausalLM  # takes seconds to import

    try:
        return TransformersCausalLM(architecture, hf_config, dtype, device)
    except ConfigurationError as error:
        if architecture in MODELS:
            raise
        raise ConfigurationError(
            f"architecture {architecture!r} is not supported; supported are {', '.join(MODELS)}, and others "
            f"as transformers has them: {error}"
        ) from error
