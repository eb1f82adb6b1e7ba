"""Builds a model runner from the configuration: weights, KV pool, kernels, CUDA graphs."""

from __future__ import annotations

import itertools
import logging
import math
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ebbtide.srt.config import CacheConfig, EngineConfig, ModelConfig
from ebbtide.srt.device import Device
from ebbtide.srt.distributed import Division, part_of
from ebbtide.srt.distributed.parallel_group import ParallelGroup
from ebbtide.srt.errors import ConfigurationError, OutOfDeviceMemory
from ebbtide.srt.layers.attention.base import (
    AttentionBackend,
    AttentionShape,
    Progress,
    kinds_of,
    no_progress,
)
from ebbtide.srt.layers.attention.registry import choose_backend
from ebbtide.srt.layers.fp8 import SCALE_LAYOUTS, Fp8Experts
from ebbtide.srt.layers.kernels.launch import card, compute_capability
from ebbtide.srt.layers.step import Kernels
from ebbtide.srt.mem_cache import Latent, State, TokenSpec
from ebbtide.srt.mem_cache.kv_pool import KVPool
from ebbtide.srt.mem_cache.page_allocator import PageTable
from ebbtide.srt.memory_saver import MemoryTag
from ebbtide.srt.memory_saver.arena import Arena
from ebbtide.srt.memory_saver.saver import ArenaSource, MemorySaver
from ebbtide.srt.model_executor.adapters import AdapterSlots
from ebbtide.srt.model_executor.batch_plan import BatchPlan, SampleSpec
from ebbtide.srt.model_executor.kv_sizing import (
    DTYPES,
    KV_DTYPES,
    build_kv_pool,
    build_kv_scales,
    cache_groups,
    kv_layout,
)
from ebbtide.srt.model_executor.loader import load_weights
from ebbtide.srt.model_executor.model_runner import ModelRunner
from ebbtide.srt.model_executor.pass_room import PassRoom
from ebbtide.srt.model_executor.rehearsal import load_kernels, rehearse
from ebbtide.srt.model_executor.sampling.sampler import Sampler
from ebbtide.srt.model_executor.weight_store import WeightStore
from ebbtide.srt.models.base import CausalLM
from ebbtide.srt.models.quantizing import Quantization
from ebbtide.srt.models.registry import build_model
from ebbtide.srt.sampling_params import SamplingParams

if TYPE_CHECKING:
    from ebbtide.srt.model_executor.graph_runner import DecodeGraphs

logger = logging.getLogger(__name__)

CUDA_GRAPH_CHUNK_BYTES = 16 << 20
PROGRESS_INTERVAL_S = 10.0
# Importing FlashInfer and finding compiled kernels takes less. If it takes longer, it compiles.
COMPILING_AFTER_S = 6.0


def build_model_runner(
    config: EngineConfig,
    device: Device,
    saver: MemorySaver,
    group: ParallelGroup | None = None,
    progress: Progress | None = None,
    *,
    stages: Progress = no_progress,
    rehearses: bool = False,
) -> ModelRunner:
    """Build the model, load its weights, size the KV pool, and capture decode steps. All memory is resident
    then.

    Args:
        group: the ranks that divide the model. All of them build at the same time.
        progress: called with what is compiled, from several threads; None: it is logged.
        stages: called with what is built; without `progress`, also with what is compiled.
        rehearses: whether to compile the kernels of all passes in parallel first, even if those of attention
            are compiled already.

    Raises ConfigurationError: the model, checkpoint, dtype or a size is not possible.
    """
    group = ParallelGroup() if group is None else group
    progress = LoggedProgress(stages) if progress is None else progress
    num_rows, cache_config = config.schedule.max_running_requests, config.cache
    heads = (config.model.num_heads, Division.EQUAL, "num_attention_heads")
    _, num_heads = part_of(group.rank, group.size, *heads)
    torch_device = torch.device(device.name)
    # A page has the same id on all ranks, so all ranks need chunks of the same size.
    is_cuda = torch_device.type == "cuda"
    device_bytes = group.smallest(device.memory_info().total_bytes) if is_cuda else None
    model = _model(config, torch_device, group)
    kept_of_tokens = next(spec for spec in model.cache_specs if not isinstance(spec, State))
    spec = kept_of_tokens.of_rank(group.rank, group.size)
    shape = attention_shape(model, spec, num_heads, config)
    make_attention = _attention_backend(config.runtime.attention_backend, shape, torch_device)
    groups = cache_groups(model.cache_specs, config.model.context_len)
    layout = kv_layout(groups, spec, cache_config, saver, device_bytes)
    pool = saver.chunk_pool(layout.chunk_bytes)
    arenas: ArenaSource = saver if pool is None else pool
    # Compilers of attention run in processes of their own, while everything else goes on.
    with ThreadPoolExecutor(1) as thread:
        compiled = thread.submit(make_attention.compile, shape, torch_device, progress, whole=rehearses)
        weight_store = _weights(model, config.model, arenas, layout.chunk_bytes, group, torch_device, stages)
        adapters = _adapters(model, weight_store, config.model, saver, device)
        # If attention still compiles, it takes most of a minute: compile other kernels meanwhile.
        if is_cuda and (rehearses or wait([compiled], COMPILING_AFTER_S).not_done):
            _rehearse(model, config, shape, torch_device, progress)
        compiled.result()
    if is_cuda:
        started = time.monotonic()
        longest = _longest_pass(config) + num_rows
        load_kernels(model, _kernels(config, torch_device), shape, longest, num_rows, torch_device)
        device.synchronize()
        logger.info("kernels loaded: s=%.1f", time.monotonic() - started)
    stages("allocating the KV cache", 0, 0)
    device.trim()  # Free what loading took before the pool is sized.
    kv_pool = build_kv_pool(
        layout,
        groups,
        config,
        arenas,
        group,
        free_bytes=device.free_bytes() // config.runtime.ranks_per_device,
        weight_bytes=weight_store.arena.resident_bytes
        + (0 if adapters is None else adapters.arena.resident_bytes),
        scales=build_kv_scales(config.model, cache_config, group, torch_device),
        states=[spec for spec in model.cache_specs if isinstance(spec, State)],
    )
    if kv_pool.states is not None:  # There may be room for the states of fewer requests.
        num_rows = kv_pool.states.slots.num_rows
        config = replace(config, schedule=replace(config.schedule, max_running_requests=num_rows))
    attention = make_attention(kv_pool, model.attention_layers, shape)
    return _ready(model, weight_store, kv_pool, attention, config, device, saver, stages, adapters, group)


def _longest_pass(config: EngineConfig) -> int:
    """The most prompt tokens that a pass may compute."""
    return config.schedule.chunked_prefill_size or config.schedule.max_prefill_tokens


def _kernels(config: EngineConfig, device: torch.device) -> Kernels:
    return Kernels.for_(device, DTYPES[config.model.dtype])


def _model(config: EngineConfig, device: torch.device, group: ParallelGroup) -> CausalLM:
    dtype, architecture = DTYPES[config.model.dtype], config.model.architecture
    impl = config.server_args.model_impl
    model = build_model(architecture, config.model.hf_config, dtype, device, impl)
    asked_for = {
        "tp_size": group.size > 1,
        "quantization": config.model.quantization is not None,
        "enable_lora": config.model.adapters is not None,
    }
    if not model.is_native and any(asked_for.values()):
        name = next(name for name, is_asked_for in asked_for.items() if is_asked_for)
        raise ConfigurationError(
            f"{name}: not supported for {architecture}, which is served as transformers has it"
        )
    if config.server_args.enable_fp32_lm_head:
        model.use_float32_logits()
    return model


def _weights(
    model: CausalLM,
    config: ModelConfig,
    arenas: ArenaSource,
    chunk_bytes: int,
    group: ParallelGroup,
    device: torch.device,
    stages: Progress,
) -> WeightStore:
    """The weight store, filled from the model's folder."""
    started = time.monotonic()
    quantization = _quantization(config, device)
    try:
        weight_store = WeightStore(model, arenas, chunk_bytes, group, quantization)
    except OutOfDeviceMemory as error:
        raise ConfigurationError(f"the weights do not fit: {error}") from error
    load_weights(weight_store, config.path, config.load_format, stages)
    logger.info("weights loaded: bytes=%d s=%.1f", weight_store.num_bytes, time.monotonic() - started)
    return weight_store


def _adapters(
    model: CausalLM, store: WeightStore, config: ModelConfig, saver: MemorySaver, device: Device
) -> AdapterSlots | None:
    """The slots of adapters; None: the engine serves none."""
    if config.adapters is None:
        return None
    try:
        slots = AdapterSlots(model, store.placements, config.adapters, saver, DTYPES[config.dtype], device)
    except OutOfDeviceMemory as error:
        raise ConfigurationError(
            f"{config.adapters.num_slots} adapters of rank {config.adapters.max_rank} do not fit: {error}; "
            "lower max_loras_per_batch or max_lora_rank, or name fewer lora_target_modules"
        ) from error
    adapted = [
        name for name, module in model.named_modules() if isinstance(module, Fp8Experts) and module.adapters
    ]
    if adapted and device.name != "cpu":
        raise ConfigurationError(
            f"enable_lora: experts in FP8 with scales of blocks, such as {adapted[0]}, have no adapters on a "
            "GPU: name lora_target_modules without them, or exclude them by quantization_exclude"
        )
    logger.info(
        "adapters: slots=%d max_rank=%d slot_bytes=%d", slots.num_slots, slots.max_rank, slots.slot_bytes
    )
    return slots


def _ready(
    model: CausalLM,
    weight_store: WeightStore,
    kv_pool: KVPool,
    attention: AttentionBackend,
    config: EngineConfig,
    device: Device,
    saver: MemorySaver,
    stages: Progress,
    adapters: AdapterSlots | None,
    group: ParallelGroup,
) -> ModelRunner:
    """The runner, warmed up, with its decode steps captured."""
    torch_device, num_rows = torch.device(device.name), config.schedule.max_running_requests
    next_tokens = torch.zeros(num_rows + 1, dtype=torch.int64, device=torch_device)
    runner = ModelRunner(
        model,
        weight_store,
        kv_pool,
        PageTable(
            num_rows, -(-config.model.context_len // config.cache.page_size), len(kv_pool.groups.windows)
        ),
        attention,
        Sampler(config.model.vocab_size, torch_device, logprobs_mode=config.server_args.logprobs_mode),
        device,
        next_tokens,
        _kernels(config, torch_device),
        adapters,
    )
    if config.server_args.enable_return_routed_experts:
        runner.routes_TLK = _room_for_routes(model, config, torch_device)
    if torch_device.type == "cuda":
        stages("warming up", 0, 0)
        taken_bytes = warm_up(runner, _longest_pass(config), DTYPES[config.model.dtype])
        batch_sizes = tuple(sorted({min(size, num_rows) for size in config.runtime.cuda_graph_bs}))
        if batch_sizes and attention.captures:
            runner.graphs = capture_graphs(runner, saver, batch_sizes, next_tokens, stages)
        if group.size > 1:
            runner.room = _pass_room(runner, config, group, taken_bytes)
        _log_left(device, config.cache)
    if kv_pool.scales is not None:
        kv_pool.scales.begin()  # Not earlier: the passes so far had no real tokens.
    return runner


def _pass_room(runner: ModelRunner, config: EngineConfig, group: ParallelGroup, taken_bytes: int) -> PassRoom:
    """Room for passes, sized by the peak of the warm-up's longest prompt."""
    num_tokens = min(_longest_pass(config), config.model.context_len)
    token_bytes = -group.smallest(-taken_bytes // num_tokens)
    itemsize = 4 if config.server_args.enable_fp32_lm_head else DTYPES[config.model.dtype].itemsize
    # Three times: this rank's logits, those of all ranks, and these concatenated.
    room = PassRoom(runner.device, group, token_bytes, 3 * itemsize * config.model.vocab_size)
    room.make(num_tokens, 1)
    return room


def _room_for_routes(model: CausalLM, config: EngineConfig, device: torch.device) -> torch.Tensor:
    """A buffer for the experts of the longest pass, [T, L, K]; zeros for layers without experts."""
    schedule = config.schedule
    if (routed := model.routed) is None:
        raise ConfigurationError(f"enable_return_routed_experts: {config.model.architecture} has no experts")
    # Without chunks, the last prompt of a pass is computed whole, even beyond max_prefill_tokens.
    whole = schedule.max_prefill_tokens + config.model.context_len
    max_tokens = schedule.chunked_prefill_size or whole
    shape = (max_tokens + schedule.max_running_requests, routed.num_layers, routed.per_token)
    dtype = torch.uint8 if routed.num_experts <= 256 else torch.uint16
    return torch.zeros(shape, dtype=dtype, device=device)


def _rehearse(
    model: CausalLM, config: EngineConfig, shape: AttentionShape, device: torch.device, progress: Progress
) -> None:
    """Compile in parallel the kernels that `warm_up` and the graphs need."""
    sampler = Sampler(config.model.vocab_size, device)
    lens = _warm_up_lens(_longest_pass(config), config.model.context_len)
    limits = config.model.adapters
    num_slots = None if limits is None else limits.num_slots
    sizes, kernels = config.runtime.cuda_graph_bs, _kernels(config, device)
    rehearse(model, kernels, sampler, shape, sizes, lens, device, progress, num_slots)


def _quantization(model_config: ModelConfig, device: torch.device) -> Quantization | None:
    """Which weights are kept in 8 bits; None: none.

    Raises ConfigurationError: this device cannot multiply them.
    """
    if (name := model_config.quantization) is None:
        return None
    if device.type == "cuda" and compute_capability(device) < (9, 0):
        raise ConfigurationError(
            f"quantization={name}: expected a GPU that multiplies e4m3, Hopper (compute capability 9.0) or "
            f"later, found {card(device)}"
        )
    return Quantization(model_config.quantization_exclude, SCALE_LAYOUTS[name])


def _log_left(device: Device, cache_config: CacheConfig) -> None:
    """Log the free device memory, after torch has reserved what the longest step and the graphs need."""
    memory = device.memory_info()
    if cache_config.max_total_tokens is not None:
        why = f"max_total_tokens is {cache_config.max_total_tokens}"
    else:
        why = f"mem_fraction_static is {cache_config.mem_fraction_static}; raise it if no trainer is to come"
    logger.info("device memory left: bytes=%d of %d: %s", memory.free_bytes, memory.total_bytes, why)


def attention_shape(model: CausalLM, spec: TokenSpec, num_heads: int, config: EngineConfig) -> AttentionShape:
    """The shapes that the attention backend must serve; `spec` and `num_heads` are those of this rank."""
    num_kv_heads, head_dim = spec.token_shape
    return AttentionShape(
        num_q_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=config.cache.page_size,
        dtype=DTYPES[config.model.dtype],
        kv_dtype=KV_DTYPES[config.cache.dtype],
        kinds=kinds_of(model.attention_layers),
        rotates_all=model.rotates_all,
        has_sinks=any(layer.sinks is not None for layer in model.attention_layers),
        latent=spec if isinstance(spec, Latent) else None,
    )


def _attention_backend(
    chosen: str | None, shape: AttentionShape, device: torch.device
) -> type[AttentionBackend]:
    """The chosen backend, or the best that can serve this shape."""
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
    """Logs when something begins, and its progress every few seconds. Thread-safe.

    Args:
        also: called each time too.
    """

    def __init__(self, also: Progress) -> None:
        self._also = also
        self._said_s: dict[str, float] = {}

    def __call__(self, what: str, number: int, total: int) -> None:
        self._also(what, number, total)
        now_s = time.monotonic()
        if now_s - self._said_s.get(what, -math.inf) >= PROGRESS_INTERVAL_S:
            self._said_s[what] = now_s
            logger.info("%s (%d/%d)", what, number, total)


def _warm_up_lens(num_tokens: int, longest: int) -> list[int]:
    return sorted({1, min(16, longest), min(num_tokens, longest)})


def warm_up(runner: ModelRunner, num_tokens: int, dtype: torch.dtype) -> int:
    """Run a short and a long prompt and a decode step, so that kernels are compiled and libraries loaded.

    Their KV goes to the first page, which no request has yet. Returns the peak bytes of the long prompt.
    """
    longest = runner.page_table.array.shape[1] * runner.kv_pool.page_size
    runner.sampler.warm_up(dtype)
    runner.kv_pool.warm_up()
    adapters = [None] if runner.adapters is None else [None, 0]
    for count, slot in itertools.product(_warm_up_lens(num_tokens, longest), adapters):
        spec = SampleSpec(SamplingParams(temperature=0.0), 0, frozenset(), [0] * count, [])
        runner.device.peak_bytes()
        runner.launch(BatchPlan.of_prompt(spec, adapter_slot=slot)).wait()
    return runner.device.peak_bytes()


def capture_graphs(
    runner: ModelRunner,
    saver: MemorySaver,
    batch_sizes: tuple[int, ...],
    next_tokens: torch.Tensor,
    stages: Progress = no_progress,
) -> DecodeGraphs:
    """Capture decode steps of these sizes as CUDA graphs.

    Raises ConfigurationError: there is no room for their scratch memory.
    """
    from ebbtide.srt.model_executor.graph_runner import DecodeGraphs

    def arena(num_bytes: int) -> Arena:
        scratch = saver.arena(MemoryTag.CUDA_GRAPH, num_bytes, CUDA_GRAPH_CHUNK_BYTES)
        scratch.resume()
        return scratch

    longest = runner.page_table.array.shape[1]
    states = runner.kv_pool.states
    try:
        with torch.inference_mode():
            return DecodeGraphs(
                runner.forward,
                runner.attention,
                arena,
                batch_sizes,
                next_tokens,
                max_pages=batch_sizes[-1] * longest,
                num_groups=len(runner.page_table.arrays),
                states=None if states is None else states.layers,
                progress=stages,
                with_adapters=runner.adapters is not None,
            )
    except (OutOfDeviceMemory, torch.OutOfMemoryError) as error:
        raise ConfigurationError(
            f"no room for CUDA graphs of up to {batch_sizes[-1]} requests: {str(error).splitlines()[0]}; "
            "lower cuda_graph_max_bs or mem_fraction_static"
        ) from error
