"""Converts verl's rollout settings to arguments of an engine, and refuses unsupported ones."""

from __future__ import annotations

from typing import Any, Final

LOGPROBS_MODES: Final = ("processed_logprobs", "raw_logprobs")


def refuse(config: Any, model_config: Any, num_nodes: int) -> None:
    """Refuse settings that would be ignored otherwise.

    Args:
        config: verl's RolloutConfig.
        model_config: verl's HFModelConfig.
        num_nodes: number of nodes of a replica.

    Raises:
        ValueError: a setting is not supported. The message says what is expected.
    """
    lora_rank = getattr(model_config, "lora_rank", 0) or 0
    merges = bool((getattr(model_config, "lora", None) or {}).get("merge", False))
    speculates = config.mtp is not None and config.mtp.enable and config.mtp.enable_rollout
    problems = [
        (config.pipeline_model_parallel_size > 1, "pipeline_model_parallel_size: expected 1"),
        (
            config.expert_parallel_size > 1,
            "expert_parallel_size: expected 1; tensor parallelism divides experts",
        ),
        (
            num_nodes > 1,
            f"a replica on {num_nodes} nodes: choose a tensor_model_parallel_size that one node has",
        ),
        (lora_rank > 0 and not merges, "LoRA: expected model.lora.merge=True"),
        (speculates, "mtp.enable_rollout: expected False"),
        (config.disaggregation.enabled, "disaggregation.enabled: expected False"),
        (
            config.quantization not in (None, "fp8"),
            f"quantization={config.quantization}: expected fp8 or none",
        ),
        (config.quantization_config_file is not None, "quantization_config_file: expected none"),
        (bool((config.qat or {}).get("enable")), "qat.enable: expected False"),
        (
            config.logprobs_mode not in (None, *LOGPROBS_MODES),
            f"logprobs_mode={config.logprobs_mode}: expected one of {', '.join(LOGPROBS_MODES)}",
        ),
        (
            config.scheduling_policy not in (None, "fcfs"),
            "scheduling_policy: expected fcfs; engine_kwargs.ebbtide.schedule_policy has the engine's own",
        ),
        (config.full_determinism, "full_determinism: expected False"),
    ]
    named = [text for is_so, text in problems if is_so]
    if named:
        raise ValueError(f"rollout.name=ebbtide does not do this: {'; '.join(named)}")


def engine_arguments(
    config: Any, model_config: Any, *, shares_gpus: bool, replica_rank: int = 0
) -> dict[str, Any]:
    """Fields of `ebbtide.ServerArgs` from verl's settings.

    Args:
        config: verl's RolloutConfig.
        model_config: verl's HFModelConfig.
        shares_gpus: whether the engine shares its GPUs with the trainer.
        replica_rank: added to the seed, so that replicas sample differently.
    """
    given = dict((config.engine_kwargs or {}).get("ebbtide") or {})
    fraction = None if shares_gpus else config.standalone_gpu_memory_utilization
    arguments = {
        "model_path": model_config.local_path,
        "dtype": config.dtype,
        "tp_size": config.tensor_model_parallel_size,
        "dp_size": config.data_parallel_size,
        "mem_fraction_static": config.gpu_memory_utilization if fraction is None else fraction,
        "context_length": config.max_model_len,
        "max_running_requests": config.max_num_seqs,
        "trust_remote_code": model_config.trust_remote_code,
        "skip_tokenizer_init": config.skip_tokenizer_init,
        "disable_cuda_graph": config.enforce_eager,
        "disable_radix_cache": not config.enable_prefix_caching,
        "logprobs_mode": config.logprobs_mode,
        "random_seed": config.seed + replica_rank,
        "load_format": config.load_format if config.load_format == "dummy" else None,
        "quantization": config.quantization,
        "enable_return_routed_experts": config.enable_rollout_routing_replay or None,
        "enable_weights_cpu_backup": shares_gpus or None,
        "log_level": "error",
        # verl's workers on other nodes send requests too. The network is that of the Ray cluster.
        "allow_unauthenticated_control": True,
    }
    return {name: value for name, value in {**arguments, **given}.items() if value is not None}
