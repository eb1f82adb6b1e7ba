"""What vLLM's clients read of a server. Source: wire_vllm section 1.5."""

from __future__ import annotations

from typing import Any, Final

from ebbtide.srt.config import EngineConfig

# The version of vLLM whose surface this is.
VLLM_VERSION: Final = "0.33.0"


def vllm_sections(config: EngineConfig) -> dict[str, Any]:
    """What vLLM's `/server_info` has beside what SGLang's has."""
    return {
        "vllm_config": {
            "model_config": {
                "model": config.model.served_model_name,
                "dtype": f"torch.{config.model.dtype}",
                "max_model_len": config.model.context_len,
                "logprobs_mode": config.runtime.logprobs_mode,
            },
            "parallel_config": {
                "tensor_parallel_size": config.parallel.tp_size,
                "data_parallel_size": config.parallel.dp_size,
            },
            # Any trainer may be met: which kind it is, its `init_info` says.
            "weight_transfer_config": {"backend": "nccl"},
            "lora_config": None,
        },
        "vllm_env": {},
        "system_env": {},
    }
