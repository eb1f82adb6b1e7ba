"""Architecture name of config.json → the module with its class."""

from importlib import import_module
from typing import Any

import torch

from ebbtide.srt.errors import ConfigurationError
from ebbtide.srt.models.base import CausalLM

# The class of this name is in that module here.
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


# Fields that no computation depends on: of training and of outputs that nobody asks for, of other parts of
# the engine, and those that transformers makes `layer_types` and `sliding_window` of. The last two lines are
# of how Mamba-2 is trained and computed; its states are kept in float32.
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
    """A config that notes which of its fields a model has read.

    What a model reads it honours or refuses. What it does not read it cannot honour: a field of transformers'
    config class that is set to something else than its default must be read, or have no effect.
    """

    def __init__(self, hf_config: Any) -> None:
        self._config, self._names = hf_config, set(_WITHOUT_EFFECT.split())

    def __getattr__(self, name: str) -> Any:
        other_names: dict[str, str] = getattr(self._config, "other_names", {})
        self._names.add(other_names.get(name, name))
        return getattr(self._config, name)

    def require_all(self, architecture: str) -> None:
        """Raises ConfigurationError for a field that was set and not read."""
        if unread := sorted(set(getattr(self._config, "changed_fields", ())) - self._names):
            value = getattr(self._config, unread[0])
            raise ConfigurationError(
                f"{architecture}: {unread[0]} {value!r} is not supported; expected its default"
            )


def build_model(
    architecture: str, hf_config: Any, dtype: torch.dtype, device: torch.device, impl: str = "auto"
) -> CausalLM:
    """The model with its parameters on the meta device and its buffers on `device`.

    Args:
        impl: "auto": ours, or transformers' where there is none; "transformers".

    Raises ConfigurationError for an unknown architecture or a setting that is not supported.
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
