"""What vLLM's clients read of a server. Source: wire_vllm section 1.5."""

from __future__ import annotations

import json
from typing import Any, Final, Literal

from msgspec import Struct

from ebbtide.srt.config import EngineConfig
from ebbtide.srt.errors import RequestRejected

# The version of vLLM whose surface this is.
VLLM_VERSION: Final = "0.33.0"


class ServerInfoQuery(Struct, kw_only=True):
    """`config_format`: of `vllm_config`, an object or its JSON as text."""

    config_format: Literal["json", "text"] = "text"


def vllm_sections(config: EngineConfig, config_format: str) -> dict[str, Any]:
    """What vLLM's `/server_info` has beside what SGLang's has.

    Raises:
        RequestRejected: there is no such `config_format`.
    """
    if config_format not in ("json", "text"):
        raise RequestRejected(
            f"config_format: expected json or text, got {config_format!r}", param="query.config_format"
        )
    vllm_config = {
        "model_config": {
            "model": config.model.served_model_name,
            "dtype": f"torch.{config.model.dtype}",
            "max_model_len": config.model.context_len,
            "quantization": config.model.quantization,
            "logprobs_mode": config.runtime.logprobs_mode,
        },
        "cache_config": {"cache_dtype": config.cache.dtype},
        "parallel_config": {
            "tensor_parallel_size": config.parallel.tp_size,
            "data_parallel_size": config.parallel.dp_size,
        },
        # Any trainer may be met: which kind it is, its `init_info` says.
        "weight_transfer_config": {"backend": "nccl"},
        "lora_config": None,
    }
    as_text = config_format == "text"
    return {
        "vllm_config": json.dumps(vllm_config) if as_text else vllm_config,
        "vllm_env": {},
        "system_env": {},
    }
