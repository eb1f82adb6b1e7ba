"""From configuration to a model runner that is ready to run."""

from __future__ import annotations

import logging
import math
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ebbtide.srt.config import CacheConfig, ModelConfig, RuntimeConfig, ScheduleConfig
from ebbtide.srt.device.base import Device
from ebbtide.srt.distributed.division import Division, part_of
from ebbtide.srt.distributed.parallel_group import ParallelGroup, SoloGroup
from ebbtide.srt.errors import ConfigurationError, OutOfDeviceMemory
from ebbtide.srt.layers.attention.base import AttentionBackend, AttentionShape, Progress, kinds_of
from ebbtide.srt.layers.attention.registry import choose_backend
from ebbtide.srt.layers.kernels.launch import card, has_fp8
from ebbtide.srt.mem_cache.kv_layout import (
    CUDA_MIN_RUN_BYTES,
    MIN_CHUNK_PAGES,
    KVLayout,
    cuda_chunk_bytes,
)
from ebbtide.srt.mem_cache.kv_pool import KVPool
from ebbtide.srt.mem_cache.kv_scales import FP8, KVScales
from ebbtide.srt.mem_cache.page_table import PageTable
from ebbtide.srt.memory_saver.arena import Arena
from ebbtide.srt.memory_saver.saver import ArenaSource, MemorySaver
from ebbtide.srt.memory_saver.tags import MemoryTag
from ebbtide.srt.model_executor.batch_plan import BatchPlan, SampleSpec
from ebbtide.srt.model_executor.kv_scales import build_kv_scales
from ebbtide.srt.model_executor.loader import load_weights
from ebbtide.srt.model_executor.model_runner import ModelRunner
from ebbtide.srt.model_executor.rehearsal import rehearse
from ebbtide.srt.model_executor.sampling.sampler import Sampler
from ebbtide.srt.model_executor.weight_store import WeightStore
from ebbtide.srt.models.base import CausalLM
from ebbtide.srt.models.moe import MoeCausalLM
from ebbtide.srt.models.quantizing import Quantization
from ebbtide.srt.models.registry import build_model
from ebbtide.srt.sampling_params import SamplingParams

if TYPE_CHECKING:
    from ebbtide.srt.model_executor.graph_runner import DecodeGraphs

logger = logging.getLogger(__name__)

CPU_KV_FRACTION = 0.1
CUDA_GRAPH_CHUNK_BYTES = 16 << 20
PROGRESS_INTERVAL_S = 10.0
# FlashInfer is imported and looks for its kernels in less.
COMPILING_AFTER_S = 6.0
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KV_DTYPES = DTYPES | {"fp8_e4m3": FP8}


def build_model_runner(
    model_config: ModelConfig,
    cache_config: CacheConfig,
    schedule_config: ScheduleConfig,
    runtime_config: RuntimeConfig,
    device: Device,
    saver: MemorySaver,
    group: ParallelGroup | None = None,
    progress: Progress | None = None,
    *,
    rehearses: bool = False,
) -> ModelRunner:
    """Build the model, load its weights, size the KV pool, capture decode steps: all of it is resident then.

    Args:
        group: the ranks that divide the model among them, all of which build at the same time.
        progress: told of what is compiled, from several threads; None: the log is.
        rehearses: whether the kernels of all passes are compiled side by side first, even where attention's
            are compiled already.

    Raises ConfigurationError for a model, a checkpoint, a dtype or a size that does not do.
    """
    started = time.monotonic()
    group = SoloGroup() if group is None else group
    progress = LoggedProgress() if progress is None else progress
    whole_model, model_config = model_config, of_rank(model_config, group)
    dtype, torch_device = DTYPES[model_config.dtype], torch.device(device.name)
    is_cuda = torch_device.type == "cuda"
    # A page has the same id on all ranks, so they must have the same chunks.
    device_bytes = group.smallest(device.memory_info().total_bytes) if is_cuda else None
    layout = kv_layout(model_config, cache_config, saver, device_bytes)
    pool = saver.chunk_pool(layout.chunk_bytes)
    arenas: ArenaSource = saver if pool is None else pool
    model = build_model(model_config.architecture, model_config.hf_config, dtype, torch_device)
    if model_config.fp32_lm_head:
        model.use_float32_logits()
    shape = attention_shape(model, model_config, cache_config)
    make_attention = _attention_backend(runtime_config.attention_backend, shape, torch_device)
    quantization = _quantization(model_config, torch_device)
    # The compilers of attention are processes of their own, beside which everything else goes on.
    with ThreadPoolExecutor(1) as beside:
        compiled = beside.submit(make_attention.compile, shape, torch_device, progress, whole=rehearses)
        try:
            weight_store = WeightStore(model, arenas, layout.chunk_bytes, group, quantization)
        except OutOfDeviceMemory as error:
            raise ConfigurationError(f"the weights do not fit: {error}") from error
        load_weights(weight_store, model_config.path, model_config.load_format)
        logger.info("weights loaded: bytes=%d s=%.1f", weight_store.num_bytes, time.monotonic() - started)
        # What is not over by then compiles for most of a minute, in which other kernels may as well.
        if is_cuda and (rehearses or wait([compiled], COMPILING_AFTER_S).not_done):
            _rehearse(model, model_config, schedule_config, runtime_config, shape, torch_device, progress)
        compiled.result()
    device.trim()  # What loading took is no reason for a smaller pool.
    free_bytes = device.free_bytes() // runtime_config.ranks_per_device
    kv_pool = build_kv_pool(
        layout,
        model_config,
        cache_config,
        schedule_config,
        arenas,
        group,
        free_bytes=free_bytes,
        weight_bytes=weight_store.arena.resident_bytes,
        scales=build_kv_scales(whole_model, cache_config, group, torch_device),
    )
    logger.info(
        "KV pool: pages=%d page_size=%d bytes=%d of %d that were free",
        kv_pool.num_pages,
        kv_pool.page_size,
        kv_pool.arena.num_bytes,
        free_bytes,
    )
    _log_staging(kv_pool, weight_store, can_lend=pool is not None)
    page_table = PageTable(
        schedule_config.max_running_requests, -(-model_config.context_len // cache_config.page_size)
    )
    attention = make_attention(kv_pool, model.attention_layers, shape)
    next_tokens = torch.zeros(
        schedule_config.max_running_requests + 1, dtype=torch.int64, device=torch_device
    )
    runner = ModelRunner(
        model,
        weight_store,
        kv_pool,
        page_table,
        attention,
        model_config.vocab_size,
        torch_device,
        next_tokens,
        logprobs_mode=runtime_config.logprobs_mode,
    )
    if isinstance(model, MoeCausalLM):
        runner.given_routes = model.given_routes
    if runtime_config.records_routes:
        if not isinstance(model, MoeCausalLM):
            raise ConfigurationError(
                f"enable_return_routed_experts: {model_config.architecture} has no experts"
            )
        # Without chunks the last prompt of a pass comes whole, however little room is left.
        whole = schedule_config.max_prefill_tokens + model_config.context_len
        max_tokens = schedule_config.chunked_prefill_size or whole
        runner.recorder = model.record_routes(max_tokens + schedule_config.max_running_requests, torch_device)
    if is_cuda:
        warm_up(runner, schedule_config.chunked_prefill_size or schedule_config.max_prefill_tokens, dtype)
        if runtime_config.cuda_graph_bs and attention.captures:
            runner.graphs = capture_graphs(
                runner, attention, saver, runtime_config.cuda_graph_bs, next_tokens
            )
        _log_left(device, cache_config)
    if kv_pool.scales is not None:
        # Not earlier: what ran so far was of nobody's request.
        kv_pool.scales.begin()
    return runner


def expert_slots(model: CausalLM) -> dict[str, Any] | None:
    """What a request must know that gives tokens their experts, as `ExpertSlots` has it."""
    if not isinstance(model, MoeCausalLM):
        return None
    return {
        "num_layers": model.config.num_layers,
        "num_experts": model.moe.num_experts,
        "per_token": model.moe.num_experts_per_token,
        "sparse_layers": sorted(model.sparse_layers),
    }


def _quantization(model_config: ModelConfig, device: torch.device) -> Quantization | None:
    """Which weights are kept in 8 bits.

    Raises ConfigurationError where this device has no products of them.
    """
    if model_config.quantization is None:
        return None
    if device.type == "cuda":
        if not has_fp8(device):
            raise ConfigurationError(
                "quantization=fp8: expected a GPU that multiplies e4m3, Hopper (compute capability 9.0) or "
                f"later, found {card(device)}"
            )
        if model_config.dtype != "bfloat16":
            raise ConfigurationError(
                f"quantization=fp8: expected dtype bfloat16 on a GPU, got {model_config.dtype}"
            )
    return Quantization(model_config.quantization_exclude)


def _log_staging(kv_pool: KVPool, weight_store: WeightStore, *, can_lend: bool) -> None:
    """How updates will find room for a second copy of the weights."""
    layout = kv_pool.layout
    num_chunks = layout.num_chunks(kv_pool.num_pages)
    if not can_lend:
        source = "free device memory alone: this memory_saver_backend cannot move memory between tags"
    elif weight_store.num_chunks < num_chunks:
        source = f"{weight_store.num_chunks} of {num_chunks} chunks of the KV cache, or free device memory"
    else:
        source = f"free device memory: the KV cache has {num_chunks} chunks, too few to lend"
    logger.info("a second copy of the weights for updates: bytes=%d from %s", weight_store.num_bytes, source)


def _log_left(device: Device, cache_config: CacheConfig) -> None:
    """What nobody has, now that torch keeps what the longest step and the graphs took."""
    memory = device.memory_info()
    if cache_config.max_total_tokens is not None:
        why = f"max_total_tokens is {cache_config.max_total_tokens}"
    else:
        why = f"mem_fraction_static is {cache_config.mem_fraction_static}; raise it if no trainer is to come"
    logger.info("device memory left: bytes=%d of %d: %s", memory.free_bytes, memory.total_bytes, why)


def of_rank(model_config: ModelConfig, group: ParallelGroup) -> ModelConfig:
    """The config with the heads of one rank.

    Raises ConfigurationError where the heads cannot be divided.
    """
    rank, size = group.rank, group.size
    _, num_heads = part_of(rank, size, model_config.num_heads, Division.EQUAL, "num_attention_heads")
    _, num_kv_heads = part_of(rank, size, model_config.num_kv_heads, Division.SHARED, "num_key_value_heads")
    return replace(model_config, num_heads=num_heads, num_kv_heads=num_kv_heads)


def attention_shape(model: CausalLM, model_config: ModelConfig, cache_config: CacheConfig) -> AttentionShape:
    """What the attention backend must serve; `model_config` is with the heads of this rank."""
    return AttentionShape(
        num_q_heads=model_config.num_heads,
        num_kv_heads=model_config.num_kv_heads,
        head_dim=model_config.head_dim,
        page_size=cache_config.page_size,
        dtype=DTYPES[model_config.dtype],
        kv_dtype=KV_DTYPES[cache_config.dtype],
        kinds=kinds_of(model.attention_layers),
    )


def _attention_backend(
    chosen: str | None, shape: AttentionShape, device: torch.device
) -> type[AttentionBackend]:
    """The chosen backend, or the best that serves."""
    backend, problems = choose_backend(chosen, shape, device)
    if problems:
        logger.warning(
            "%s; attention by %s instead%s",
            "; ".join(problems),
            backend.__name__,
            "" if backend.captures or device.type == "cpu" else ", without CUDA graphs: slow",
        )
    return backend


class LoggedProgress:
    """Says in the log when something begins, and now and then how far it is; for several threads."""

    def __init__(self) -> None:
        self._said_s: dict[str, float] = {}

    def __call__(self, what: str, number: int, total: int) -> None:
        now_s = time.monotonic()
        if now_s - self._said_s.get(what, -math.inf) >= PROGRESS_INTERVAL_S:
            self._said_s[what] = now_s
            logger.info("%s (%d/%d)", what, number, total)


def _rehearse(
    model: CausalLM,
    model_config: ModelConfig,
    schedule_config: ScheduleConfig,
    runtime_config: RuntimeConfig,
    shape: AttentionShape,
    device: torch.device,
    progress: Progress,
) -> None:
    """Have the kernels of the passes compiled that `warm_up` and the graphs run one after the other."""
    sampler = Sampler(model_config.vocab_size, device)
    longest = schedule_config.chunked_prefill_size or schedule_config.max_prefill_tokens
    lens = _warm_up_lens(longest, model_config.context_len)
    rehearse(model, sampler, shape, runtime_config.cuda_graph_bs, lens, device, progress)


def _warm_up_lens(num_tokens: int, longest: int) -> list[int]:
    return sorted({1, min(16, longest), min(num_tokens, longest)})


def warm_up(runner: ModelRunner, num_tokens: int, dtype: torch.dtype) -> None:
    """Run a short and a long prompt and a decode step, so that kernels are compiled and libraries started.

    Their KV goes to the first page, which nobody has yet.
    """
    longest = runner.page_table.array.shape[1] * runner.kv_pool.page_size
    runner.sampler.warm_up(dtype)
    runner.kv_pool.warm_up()
    for count in _warm_up_lens(num_tokens, longest):
        plan = BatchPlan(
            input_ids_T=np.zeros(count, dtype=np.int64),
            page_rows_R=np.zeros(1, dtype=np.int32),
            starts_R=np.zeros(1, dtype=np.int32),
            num_new_R=np.array([count], dtype=np.int32),
            samples_R=np.ones(1, dtype=np.bool_),
            num_outputs_R=np.zeros(1, dtype=np.int64),
            specs=[SampleSpec(SamplingParams(temperature=0.0), 0, frozenset(), [0] * count, [])],
        )
        runner.launch(plan).wait()


def capture_graphs(
    runner: ModelRunner,
    attention: AttentionBackend,
    saver: MemorySaver,
    batch_sizes: tuple[int, ...],
    next_tokens: torch.Tensor,
) -> DecodeGraphs:
    """Decode steps of these sizes as CUDA graphs.

    Raises ConfigurationError where there is no room for their scratch memory.
    """
    from ebbtide.srt.model_executor.graph_runner import DecodeGraphs

    def arena(num_bytes: int) -> Arena:
        scratch = saver.arena(MemoryTag.CUDA_GRAPH, num_bytes, CUDA_GRAPH_CHUNK_BYTES)
        scratch.resume()
        return scratch

    longest = runner.page_table.array.shape[1]
    try:
        with torch.inference_mode():
            return DecodeGraphs(
                runner.model, attention, arena, batch_sizes, next_tokens, max_pages=batch_sizes[-1] * longest
            )
    except (OutOfDeviceMemory, torch.OutOfMemoryError) as error:
        raise ConfigurationError(
            f"no room for CUDA graphs of up to {batch_sizes[-1]} requests: {str(error).splitlines()[0]}; "
            "lower cuda_graph_max_bs or mem_fraction_static"
        ) from error


def kv_layout(
    model_config: ModelConfig, cache_config: CacheConfig, saver: MemorySaver, device_bytes: int | None
) -> KVLayout:
    """What this rank stores of each token, and where. `model_config` has the heads of this rank.

    Args:
        device_bytes: memory of the GPU; None for the CPU.
    """
    layout = KVLayout(
        num_layers=model_config.num_layers,
        page_size=cache_config.page_size,
        num_kv_heads=model_config.num_kv_heads,
        head_dim=model_config.head_dim,
        dtype=KV_DTYPES[cache_config.dtype],
        granularity=saver.granularity,
        min_chunk_pages=MIN_CHUNK_PAGES,
    )
    if device_bytes is None:
        return layout
    num_tokens = cache_config.max_total_tokens
    pool_bytes = num_tokens // layout.page_size * layout.page_bytes if num_tokens is not None else None
    chunk_bytes = cuda_chunk_bytes(device_bytes, pool_bytes)
    run_bytes = CUDA_MIN_RUN_BYTES
    if pool_bytes is not None:  # Where the pool is small, more chunks are worth more than long runs.
        run_bytes = min(run_bytes, chunk_bytes // layout.num_planes)
    return replace(layout, min_chunk_bytes=chunk_bytes, min_run_bytes=run_bytes)


def build_kv_pool(
    layout: KVLayout,
    model_config: ModelConfig,
    cache_config: CacheConfig,
    schedule_config: ScheduleConfig,
    arenas: ArenaSource,
    group: ParallelGroup,
    *,
    free_bytes: int,
    weight_bytes: int,
    scales: KVScales | None = None,
) -> KVPool:
    """A resident pool of as many pages as `choose_num_pages` says on the rank with least room."""
    num_pages = choose_num_pages(
        layout,
        free_bytes=free_bytes,
        weight_bytes=weight_bytes,
        max_total_tokens=cache_config.max_total_tokens,
        mem_fraction_static=cache_config.mem_fraction_static,
        max_running_requests=schedule_config.max_running_requests,
        context_len=model_config.context_len,
    )
    num_pages = group.smallest(num_pages)
    try:
        arena = arenas.arena(MemoryTag.KV_CACHE, layout.arena_bytes(num_pages), layout.chunk_bytes)
        arena.resume()
    except OutOfDeviceMemory as error:
        raise ConfigurationError(f"the KV pool does not fit: {error}; lower max_total_tokens") from error
    return KVPool(arena, layout, num_pages, scales)


def choose_num_pages(
    layout: KVLayout,
    *,
    free_bytes: int,
    weight_bytes: int,
    max_total_tokens: int | None,
    mem_fraction_static: float | None,
    max_running_requests: int,
    context_len: int,
) -> int:
    """How many pages the KV pool gets.

    `max_total_tokens` is taken as it is, in whole pages. Without it, weights and pool together get
    `mem_fraction_static` of the memory that was free before the weights were loaded; where that is null
    too, the pool gets a tenth of what is free now. Sized by memory, the pool consists of whole chunks, and is
    never larger than `max_running_requests` full contexts can fill.

    Args:
        free_bytes: this rank's share of what is free now, with the weights loaded.
        weight_bytes: what they take.

    Raises ConfigurationError, with the bytes, where not one chunk fits.
    """
    page_size, chunk_bytes = layout.page_size, layout.chunk_bytes
    if max_total_tokens is not None:
        num_pages = max_total_tokens // page_size
        if num_pages < 1:
            raise ConfigurationError(
                f"max_total_tokens {max_total_tokens} is less than one page of {page_size} tokens"
            )
        if layout.arena_bytes(num_pages) > free_bytes:
            raise ConfigurationError(
                f"max_total_tokens {max_total_tokens} needs {layout.arena_bytes(num_pages)} bytes, "
                f"{free_bytes} are free"
            )
        return num_pages
    if mem_fraction_static is not None:
        budget_bytes = int((free_bytes + weight_bytes) * mem_fraction_static) - weight_bytes
    else:
        budget_bytes = int(free_bytes * CPU_KV_FRACTION)
    num_chunks = min(budget_bytes, free_bytes) // chunk_bytes
    if num_chunks < 1:
        raise ConfigurationError(
            f"the KV pool may take {max(0, budget_bytes)} bytes ({free_bytes} are free beside {weight_bytes} "
            f"of weights), but one chunk of {layout.chunk_pages} pages of {page_size} tokens needs "
            f"{chunk_bytes}; set mem_fraction_static higher or page_size lower"
        )
    num_useful = max_running_requests * -(-context_len // page_size)
    return min(num_chunks * layout.chunk_pages, num_useful)
