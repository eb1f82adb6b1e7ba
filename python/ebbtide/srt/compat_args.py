"""Server arguments taken because RL frameworks pass them to SGLang: names, types, SGLang's defaults.

Source: wire_api section 7.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True)
class NoEffectArgs:
    """Accepted without effect; a value other than SGLang's default is warned about once at start."""

    schedule_conservativeness: float = 1.0
    sampling_backend: str | None = None
    grammar_backend: str | None = None
    mm_attention_backend: str | None = None
    cuda_graph_backend_prefill: str | None = None
    cuda_graph_backend_decode: str | None = None
    disable_cuda_graph_padding: bool = False
    disable_piecewise_cuda_graph: bool = False
    disable_outlines_disk_cache: bool = False
    enable_nccl_nvls: bool = False
    enable_symm_mem: bool = False
    enable_p2p_check: bool = False
    enable_mixed_chunk: bool = False
    enable_torch_compile: bool = False
    torch_compile_max_bs: int = 32
    enable_hierarchical_cache: bool = False
    enable_nan_detection: bool = False
    triton_attention_reduce_in_fp32: bool = False
    triton_attention_num_kv_splits: int = 8
    num_continuous_decode_steps: int = 1
    allow_auto_truncate: bool = False
    cpu_offload_gb: int = 0
    enable_draft_weights_cpu_backup: bool = False
    enable_multimodal: bool | None = None
    model_loader_extra_config: str = "{}"
    download_dir: str | None = None
    show_time_cost: bool = False
    tokenizer_worker_num: int = 1
    moe_runner_backend: str = "auto"
    moe_a2a_backend: str = "none"
    moe_dense_tp_size: int | None = None
    moe_dp_size: int = 1
    enable_ep_moe: bool = False
    enable_dp_lm_head: bool = False
    prefill_round_robin_balance: bool = False
    disaggregation_bootstrap_port: int = 8998
    disaggregation_transfer_backend: str = "mooncake"
    disaggregation_ib_device: str | None = None
    engine_info_bootstrap_port: int = 6789
    max_loaded_loras: int | None = None
    max_loras_per_batch: int = 8
    max_lora_rank: int | None = None
    lora_backend: str = "csgmv"
    lora_target_modules: list[str] | None = None
    speculative_num_steps: int | None = None
    speculative_eagle_topk: int | None = None
    speculative_num_draft_tokens: int | None = None
    speculative_draft_model_path: str | None = None
    reasoning_parser: str | None = None
    tool_call_parser: str | None = None
    enable_cache_report: bool = False
    warmups: str | None = None
    soft_watchdog_timeout: float | None = None


@dataclass(kw_only=True)
class DefaultOnlyArgs:
    """Accepted at their default only: ignoring another value would change results or hang a client."""

    pp_size: int = 1
    ep_size: int = 1
    quantization: str | None = None
    is_embedding: bool = False
    speculative_algorithm: str | None = None
    enable_lora: bool | None = None
    lora_paths: list[str] | None = None
    disaggregation_mode: str = "null"
    encoder_only: bool = False
    grpc_mode: bool | None = False
    enable_dp_attention: bool = False
    enable_return_routed_experts: bool = False
    enable_return_indexer_topk: bool = False
    enable_return_hidden_states: bool = False
    enable_deterministic_inference: bool = False
    enable_prefill_only_deterministic_inference: bool = False
    rl_on_policy_target: str | None = None
    torchao_config: str = ""
