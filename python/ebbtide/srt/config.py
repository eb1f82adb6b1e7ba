"""ServerArgs resolved once into frozen slices, one per part of the engine."""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Final

from ebbtide.srt import hf_folder
from ebbtide.srt.argument_checks import (
    check_arguments,
    check_quantized_dtype,
    seconds_from,
    sees_cuda,
    settled,
)
from ebbtide.srt.errors import ConfigurationError
from ebbtide.srt.server_args import OWN_SCHEDULE_POLICIES, ServerArgs

logger = logging.getLogger(__name__)

PAGE_SIZE = 16
# One prompt's share of a pass's prefill tokens, and the least tokens that it stands for. Passes with fewer
# tokens are hardly faster, but a long prompt needs more of them; even more so with experts, each of which
# gets only few of the tokens.
PREFILL_SHARE, MIN_PREFILL_SHARE_TOKENS, MIN_PREFILL_SHARE_WITH_EXPERTS = 1 / 16, 512, 1024
CPU_MAX_RUNNING_REQUESTS = 64
CPU_CHUNKED_PREFILL_SIZE = 512
CUDA_MAX_RUNNING_REQUESTS = 512
CUDA_CHUNKED_PREFILL_SIZE = 8192
# The rest is for activations, CUDA graphs, workspaces and the driver, and for a trainer that starts later: on
# a GPU with 140 GB, for 8B weights and a few GB of buckets.
CUDA_MEM_FRACTION_STATIC = 0.85
# If the weights take most of that, there is no room for a trainer's weights anyway: the KV pool then gets
# this share of the memory that the weights leave.
CUDA_LEAST_POOL_SHARE = 0.5
CUDA_GRAPH_MAX_BS = 512
# Long, since nodes are started by hand or by a queue, and load gigabytes before their ranks meet.
DIST_TIMEOUT_S = 600.0

ANY_NAME: Final = "*"
DEFAULT_LORA_RANK, MAX_LORA_RANK = 64, 256
ALL_TARGETS: Final = frozenset({"all", "all-linear"})


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """The LoRA adapters that device memory is reserved for.

    `targets`: suffixes of the names of modules that may have adapters; None: all that can.
    """

    num_slots: int
    max_rank: int
    targets: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The model and its tokenizer.

    Attributes:
        path, tokenizer_path: local folders.
        names_answered: the names that requests may give as their model; with `ANY_NAME`, any.
        hf_config: the fields of transformers' config, overrides merged in.
        context_len: tokens of prompt and output together.
        eos_token_ids: of config.json and generation_config.json; the tokenizer's own may add to them.
        quantization: "fp8" (blocks) or "w8a8_fp8" (rows); None: weights keep their dtype.
        quantization_exclude: patterns of modules that keep their dtype, see `models.quantizing.Quantization`.
        adapters: None: the engine serves none.
    """

    path: str
    tokenizer_path: str
    tokenizer_mode: str
    trust_remote_code: bool
    architecture: str
    architectures: list[str]
    model_type: str
    hf_config: SimpleNamespace
    dtype: str
    context_len: int
    vocab_size: int
    num_layers: int
    num_kv_heads: int
    num_heads: int
    head_dim: int
    eos_token_ids: frozenset[int]
    load_format: str
    served_model_name: str
    names_answered: frozenset[str]
    quantization: str | None = None
    quantization_exclude: tuple[str, ...] = ()
    adapters: AdapterLimits | None = None


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The KV pool and the prefix cache.

    Attributes:
        max_total_tokens: size of the pool; None: by the free memory.
        mem_fraction_static: share of the free memory for weights and pool.
        least_pool_share: share of the memory beside the weights that the pool may take even if
            `mem_fraction_static` leaves it less.
        scales, calibration_tokens: for a pool in FP8, see `KVScales`.
    """

    page_size: int
    max_total_tokens: int | None
    mem_fraction_static: float | None
    least_pool_share: float
    dtype: str
    enable_prefix_cache: bool
    scales: str = "checkpoint"
    calibration_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ScheduleConfig:
    """What goes into a batch.

    Attributes:
        max_queued_requests: None: no limit.
        chunked_prefill_size: in tokens; None: no chunking.
        overlap: whether a step is planned and launched while the previous one runs.
        waiting_timeout_s: limit of the time until a request's first step; None: no limit.
        running_timeout_s: limit of the time for which a request runs; None: no limit.
        decode_log_interval: forward passes between status lines in the log; 0: none.
        prefill_share: the largest share of a pass's prefill tokens for one prompt.
        ends_nonfinite: whether non-finite logits end their request.
        fits_running: whether fewer requests run if their states would leave too little for the KV cache.
        max_running_per_adapter: None: no limit.
    """

    max_running_requests: int
    max_queued_requests: int | None
    chunked_prefill_size: int | None
    max_prefill_tokens: int
    policy: str
    overlap: bool
    waiting_timeout_s: float | None = None
    running_timeout_s: float | None = None
    decode_log_interval: int = 0
    prefill_share: float = 1.0
    ends_nonfinite: bool = True
    fits_running: bool = False
    max_running_per_adapter: int | None = None


@dataclass(frozen=True, slots=True)
class RuntimeConfig:
    """The device and the process.

    Attributes:
        device: as torch spells it, with its index: "cpu", "cuda:0".
        attention_backend: a name of the registry of backends; None: the best that serves the model here.
        cuda_graph_bs: batch sizes of decode steps to capture, ascending; empty for none.
        ranks_per_device: how many ranks share the memory of this rank's device; on a CPU, all of this node.
    """

    device: str
    attention_backend: str | None
    cuda_graph_bs: tuple[int, ...]
    random_seed: int
    ranks_per_device: int


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a rank. `tp_size` ranks share each replica of the model; there are `dp_size` replicas."""

    tp_size: int = 1
    dp_size: int = 1
    tp_rank: int = 0
    dp_rank: int = 0

    @property
    def num_ranks(self) -> int:
        """The number of ranks in all replicas."""
        return self.tp_size * self.dp_size

    @property
    def rank(self) -> int:
        """The rank's number among all ranks, replica by replica."""
        return self.dp_rank * self.tp_size + self.tp_rank


@dataclass(frozen=True, slots=True)
class ParallelConfig(Place):
    """The place of this process (ranks 0 and 0 in the API process), and the layout of all ranks.

    Attributes:
        nnodes: number of machines. Each has an equal number of ranks, which are numbered replica by replica.
        dist_init_addr: `host:port` of node 0, where the nodes meet; None: there is one node.
        rendezvous_port: where the ranks of replica 0 meet if they are on several nodes; None: a free one.
        base_gpu_id, gpu_id_step: the device of local rank i is `base_gpu_id + i * gpu_id_step`.
        load_balance_method: how the replica of a request is chosen: `round_robin` or `shortest_queue`.
    """

    nnodes: int = 1
    node_rank: int = 0
    dist_init_addr: str | None = None
    dist_timeout_s: float = DIST_TIMEOUT_S
    rendezvous_port: int | None = None
    base_gpu_id: int = 0
    gpu_id_step: int = 1
    load_balance_method: str = "round_robin"

    @property
    def ranks_per_node(self) -> int:
        return self.num_ranks // self.nnodes


ONE_RANK: Final = Place()


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The whole configuration, resolved. It is pickled for the engine's processes.

    `server_args`: as `settled` returns them. Values that need no resolving are only there.
    """

    model: ModelConfig
    cache: CacheConfig
    schedule: ScheduleConfig
    runtime: RuntimeConfig
    parallel: ParallelConfig
    server_args: ServerArgs

    @property
    def precision(self) -> dict[str, str]:
        """The precision of weights and KV cache, for trainers, which must know how rollouts were computed."""
        return {"weights": self.model.quantization or self.model.dtype, "kv_cache": self.cache.dtype}


def resolve(args: ServerArgs) -> EngineConfig:
    """Check the arguments, read the model's config, and choose the values that were left open.

    Raises ConfigurationError: with the argument or file, what was expected and what was found.
    """
    args = settled(args)
    check_arguments(args)
    return resolve_for(args, _resolve_model(args))


def resolve_for(args: ServerArgs, model: ModelConfig) -> EngineConfig:
    """Choose the values that were left open, for a known model. `args`: as `settled` returns them."""
    device = _resolve_device(args)
    if args.memory_saver_backend == "torch_memory_saver" and not _is_cuda(device):
        raise ConfigurationError("memory_saver_backend=torch_memory_saver needs device=cuda")
    check_quantized_dtype(model.quantization, model.dtype, is_cuda=_is_cuda(device))
    cache = _resolve_cache(args, model, device)
    schedule = _resolve_schedule(args, model, device)
    return EngineConfig(
        model=model,
        cache=cache,
        schedule=schedule,
        runtime=_resolve_runtime(args, device, schedule),
        parallel=_resolve_parallel(args, device),
        server_args=args,
    )


def _resolve_model(args: ServerArgs) -> ModelConfig:
    with_weights = args.load_format != "dummy"
    folder = hf_folder.local_folder("model_path", args.model_path, args.revision, with_weights=with_weights)
    tokenizer = folder
    if args.tokenizer_path is not None and not args.skip_tokenizer_init:
        tokenizer = hf_folder.local_folder(
            "tokenizer_path", args.tokenizer_path, args.revision, with_weights=False
        )
    hf_config = hf_folder.load_hf_config(
        folder, trust_remote_code=args.trust_remote_code, overrides_json=args.json_model_override_args
    )
    names = hf_folder.architectures(folder, hf_config)
    names_served = [name for name in (args.served_model_name or "").split(",") if name]
    hf_folder.require_sizes(folder, hf_config)
    num_heads = hf_folder.positive_int(folder, hf_config, "num_attention_heads")
    hidden_size = hf_folder.positive_int(folder, hf_config, "hidden_size")
    longest = hf_folder.positive_int(folder, hf_config, "max_position_embeddings")
    context_len = longest if args.context_length is None else args.context_length
    if context_len > longest:
        raise ConfigurationError(
            f"context_length: expected at most the model's max_position_embeddings, {longest}, got "
            f"{context_len}; json_model_override_args can raise that"
        )
    dtype = hf_folder.declared_dtype(folder, hf_config) if args.dtype == "auto" else args.dtype
    quantization, kept = hf_folder.quantization(folder, hf_config, args.quantization)
    return ModelConfig(
        path=str(folder),
        tokenizer_path=str(tokenizer),
        tokenizer_mode=args.tokenizer_mode,
        trust_remote_code=args.trust_remote_code,
        architecture=names[0],
        architectures=names,
        model_type=hf_config.model_type,
        hf_config=hf_config,
        dtype=dtype,
        context_len=context_len,
        vocab_size=hf_folder.positive_int(folder, hf_config, "vocab_size"),
        num_layers=hf_folder.positive_int(folder, hf_config, "num_hidden_layers"),
        num_kv_heads=getattr(hf_config, "num_key_value_heads", None) or num_heads,
        num_heads=num_heads,
        head_dim=getattr(hf_config, "head_dim", None) or hidden_size // num_heads,
        eos_token_ids=hf_folder.eos_token_ids(folder, hf_config),
        load_format=args.load_format,
        served_model_name=next((name for name in names_served if name != ANY_NAME), args.model_path),
        names_answered=frozenset((args.model_path, str(folder), *names_served)),
        quantization=quantization,
        quantization_exclude=(*kept, *(args.quantization_exclude or ())),
        adapters=_adapter_limits(args),
    )


def _adapter_limits(args: ServerArgs) -> AdapterLimits | None:
    rank = DEFAULT_LORA_RANK if args.max_lora_rank is None else args.max_lora_rank
    if rank > MAX_LORA_RANK:
        raise ConfigurationError(f"max_lora_rank: expected at most {MAX_LORA_RANK}, got {rank}")
    targets = tuple(args.lora_target_modules or ("all",))
    if not args.enable_lora and not args.lora_paths and args.lora_folder is None:
        return None
    # One more, to load an adapter while a batch uses the others.
    num_slots = args.max_loras_per_batch + 1
    return AdapterLimits(num_slots, rank, None if ALL_TARGETS & set(targets) else targets)


def _resolve_device(args: ServerArgs) -> str:
    """The device's name. Raises ConfigurationError: it is cuda, and torch sees no CUDA device."""
    if args.device == "cpu":
        return "cpu"
    has_cuda = sees_cuda()
    if args.device == "cuda" and not has_cuda:
        raise ConfigurationError("device=cuda: torch sees no CUDA device; see `ebbtide doctor`")
    return f"cuda:{args.base_gpu_id}" if has_cuda else "cpu"


def _is_cuda(device: str) -> bool:
    return device.startswith("cuda")


def _resolve_cache(args: ServerArgs, model: ModelConfig, device: str) -> CacheConfig:
    page_size = args.page_size if args.page_size is not None else PAGE_SIZE
    if args.max_total_tokens is not None and args.max_total_tokens < page_size:
        raise ConfigurationError(
            f"max_total_tokens: expected at least one page ({page_size}), got {args.max_total_tokens}"
        )
    fraction, least_pool_share = args.mem_fraction_static, 0.0
    if fraction is None and _is_cuda(device):
        fraction, least_pool_share = CUDA_MEM_FRACTION_STATIC, CUDA_LEAST_POOL_SHARE
    dtype = model.dtype if args.kv_cache_dtype == "auto" else args.kv_cache_dtype
    if args.kv_cache_scales != "checkpoint" and dtype != "fp8_e4m3":
        raise ConfigurationError(
            f"kv_cache_scales={args.kv_cache_scales}: expected kv_cache_dtype=fp8_e4m3, the only one with "
            f"scales, got {dtype}"
        )
    return CacheConfig(
        page_size=page_size,
        max_total_tokens=args.max_total_tokens,
        mem_fraction_static=fraction,
        least_pool_share=least_pool_share,
        dtype=dtype,
        enable_prefix_cache=not args.disable_radix_cache,
        scales=args.kv_cache_scales,
        calibration_tokens=args.kv_cache_calibration_tokens,
    )


def _prefill_share(chunk: int, model: ModelConfig) -> float:
    has_experts = bool(getattr(model.hf_config, "num_experts_per_tok", None))
    tokens = MIN_PREFILL_SHARE_WITH_EXPERTS if has_experts else MIN_PREFILL_SHARE_TOKENS
    return max(PREFILL_SHARE, min(1.0, tokens / chunk))


def _resolve_schedule(args: ServerArgs, model: ModelConfig, device: str) -> ScheduleConfig:
    is_cuda = _is_cuda(device)
    chunk, running = args.chunked_prefill_size, args.max_running_requests
    if chunk is None:
        chunk = CUDA_CHUNKED_PREFILL_SIZE if is_cuda else CPU_CHUNKED_PREFILL_SIZE
    if running is None:
        running = CUDA_MAX_RUNNING_REQUESTS if is_cuda else CPU_MAX_RUNNING_REQUESTS
    return ScheduleConfig(
        max_running_requests=running,
        max_queued_requests=args.max_queued_requests,
        chunked_prefill_size=chunk if chunk != -1 else None,
        max_prefill_tokens=args.max_prefill_tokens,
        policy=_policy(args),
        # On a CPU the host is the device: there is nothing to overlap with.
        overlap=is_cuda and not args.disable_overlap_schedule,
        waiting_timeout_s=seconds_from("SGLANG_REQ_WAITING_TIMEOUT"),
        running_timeout_s=seconds_from("SGLANG_REQ_RUNNING_TIMEOUT"),
        decode_log_interval=args.decode_log_interval or 0,
        prefill_share=args.prefill_share or _prefill_share(chunk, model),
        ends_nonfinite=args.nonfinite_logits == "abort",
        fits_running=args.max_running_requests is None,
        max_running_per_adapter=args.max_running_requests_per_lora,
    )


def _policy(args: ServerArgs) -> str:
    policy = args.schedule_policy if args.schedule_policy in OWN_SCHEDULE_POLICIES else "fcfs"
    if not args.enable_priority_scheduling:
        return policy
    by_priority = {"fcfs": "priority", "priority": "priority", "lof": "priority-lof"}
    if policy not in by_priority:
        raise ConfigurationError(
            f"enable_priority_scheduling: expected schedule_policy fcfs or lof, got {policy}"
        )
    return by_priority[policy]


def _resolve_runtime(args: ServerArgs, device: str, schedule: ScheduleConfig) -> RuntimeConfig:
    seed = args.random_seed
    if seed is None:
        seed = random.SystemRandom().randrange(2**31)
    logger.info("random_seed=%d", seed)
    attention_backend = args.attention_backend
    if attention_backend in ("fa3", "fa4", "aiter"):
        logger.warning("attention_backend=%s is not in Ebbtide: the default is used", attention_backend)
        attention_backend = None
    # Checked on CPUs too, so that errors show up before a GPU is needed.
    cuda_graph_bs = _cuda_graph_bs(args, schedule)
    return RuntimeConfig(
        device=device,
        attention_backend=attention_backend,
        cuda_graph_bs=cuda_graph_bs if _is_cuda(device) else (),
        random_seed=seed,
        ranks_per_device=1 if _is_cuda(device) else args.tp_size * args.dp_size // args.nnodes,
    )


# SGLang's name → ours.
_LOAD_BALANCE_METHODS = {
    "auto": "round_robin",
    "round_robin": "round_robin",
    "follow_bootstrap_room": "round_robin",
    "total_requests": "round_robin",
    "shortest_queue": "shortest_queue",
    "total_tokens": "shortest_queue",
}


def _resolve_parallel(args: ServerArgs, device: str) -> ParallelConfig:
    parallel = ParallelConfig(
        tp_size=args.tp_size,
        dp_size=args.dp_size,
        nnodes=args.nnodes,
        node_rank=args.node_rank,
        dist_init_addr=args.dist_init_addr if args.nnodes > 1 else None,
        dist_timeout_s=float(args.dist_timeout if args.dist_timeout is not None else DIST_TIMEOUT_S),
        rendezvous_port=args.nccl_port,
        base_gpu_id=args.base_gpu_id,
        gpu_id_step=args.gpu_id_step,
        load_balance_method=_LOAD_BALANCE_METHODS[args.load_balance_method],
    )
    if _is_cuda(device):
        _check_devices(parallel)
    return parallel


def _check_devices(parallel: ParallelConfig) -> None:
    import torch

    num_visible = torch.accelerator.device_count()
    num_needed = parallel.base_gpu_id + (parallel.ranks_per_node - 1) * parallel.gpu_id_step + 1
    if num_needed > num_visible:
        raise ConfigurationError(
            f"{parallel.ranks_per_node} ranks on this node (tp_size={parallel.tp_size}, "
            f"dp_size={parallel.dp_size}, nnodes={parallel.nnodes}) from base_gpu_id={parallel.base_gpu_id} "
            f"in steps of {parallel.gpu_id_step} need {num_needed} visible GPUs, found {num_visible}"
        )


def _cuda_graph_bs(args: ServerArgs, schedule: ScheduleConfig) -> tuple[int, ...]:
    """The batch sizes to capture. They are close together, since a step is padded to the next one."""
    if args.disable_cuda_graph:
        return ()
    if args.cuda_graph_bs is not None:
        if not all(size > 0 for size in args.cuda_graph_bs):
            raise ConfigurationError(f"cuda_graph_bs: expected sizes above 0, got {args.cuda_graph_bs}")
        return tuple(sorted(set(args.cuda_graph_bs)))
    largest = args.cuda_graph_max_bs if args.cuda_graph_max_bs is not None else CUDA_GRAPH_MAX_BS
    largest = min(largest, schedule.max_running_requests)
    sizes = {1, 2, 4, *range(8, 256, 8), *range(256, 512, 16), *range(512, largest, 32)}
    return tuple(sorted({size for size in sizes if size < largest} | {largest}))
