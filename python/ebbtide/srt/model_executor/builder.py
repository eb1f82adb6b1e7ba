"""From configuration to a model runner that is ready to run."""

import logging
import time

import torch

from ebbtide.srt.config import CacheConfig, ModelConfig, RuntimeConfig, ScheduleConfig
from ebbtide.srt.device.base import Device
from ebbtide.srt.errors import ConfigurationError, OutOfDeviceMemory
from ebbtide.srt.layers.attention.registry import build_attention
from ebbtide.srt.mem_cache.kv_pool import KVPool
from ebbtide.srt.mem_cache.page_table import PageTable
from ebbtide.srt.memory_saver.arena import Arena
from ebbtide.srt.memory_saver.tags import MemoryTag
from ebbtide.srt.memory_saver.virtual_memory.base import VirtualMemory
from ebbtide.srt.model_executor.loader import load_weights
from ebbtide.srt.model_executor.model_runner import ModelRunner
from ebbtide.srt.model_executor.weight_store import WeightStore
from ebbtide.srt.models.registry import build_model

logger = logging.getLogger(__name__)

CPU_KV_FRACTION = 0.1
# Touching host memory for the first time takes as long as copying it: what is staged is taken in such pieces,
# between forward passes.
WEIGHTS_CHUNK_BYTES = 64 << 20
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def build_model_runner(
    model_config: ModelConfig,
    cache_config: CacheConfig,
    schedule_config: ScheduleConfig,
    runtime_config: RuntimeConfig,
    device: Device,
) -> ModelRunner:
    """Build the model, load its weights, size the KV pool; both arenas are resident afterwards.

    Raises ConfigurationError for a model, a checkpoint, a dtype or a size that does not do.
    """
    started = time.monotonic()
    vm = device.virtual_memory()
    dtype = DTYPES[model_config.dtype]
    model = build_model(model_config.architecture, model_config.hf_config, dtype, torch.device(device.name))
    try:
        weight_store = WeightStore(model, vm, WEIGHTS_CHUNK_BYTES)
    except OutOfDeviceMemory as error:
        raise ConfigurationError(f"the weights do not fit: {error}") from error
    load_weights(weight_store, model_config.path, model_config.load_format)
    logger.info("weights loaded: bytes=%d s=%.1f", weight_store.num_bytes, time.monotonic() - started)
    kv_pool = build_kv_pool(
        model_config,
        cache_config,
        schedule_config,
        vm,
        free_bytes=device.memory_info().free_bytes,
        weight_bytes=weight_store.arena.resident_bytes,
    )
    logger.info(
        "KV pool: pages=%d page_size=%d bytes=%d",
        kv_pool.num_pages,
        kv_pool.page_size,
        kv_pool.arena.num_bytes,
    )
    page_table = PageTable(
        schedule_config.max_running_requests, -(-model_config.context_len // cache_config.page_size)
    )
    attention = build_attention(runtime_config.attention_backend, kv_pool, model_config.num_layers, dtype)
    return ModelRunner(model, weight_store, kv_pool, page_table, attention, model_config.vocab_size)


def build_kv_pool(
    model_config: ModelConfig,
    cache_config: CacheConfig,
    schedule_config: ScheduleConfig,
    vm: VirtualMemory,
    *,
    free_bytes: int,
    weight_bytes: int,
) -> KVPool:
    """A resident pool of as many pages as `choose_num_pages` says."""
    dtype = DTYPES[cache_config.dtype]
    heads = (model_config.num_kv_heads, model_config.head_dim, dtype)
    layers, page_size = model_config.num_layers, cache_config.page_size
    num_pages = choose_num_pages(
        page_size=page_size,
        bytes_per_page=KVPool.bytes_per_page(layers, page_size, *heads),
        free_bytes=free_bytes,
        weight_bytes=weight_bytes,
        max_total_tokens=cache_config.max_total_tokens,
        mem_fraction_static=cache_config.mem_fraction_static,
        max_running_requests=schedule_config.max_running_requests,
        context_len=model_config.context_len,
    )
    arena = Arena(MemoryTag.KV_CACHE, KVPool.bytes_needed(layers, num_pages, page_size, *heads), vm)
    try:
        arena.resume()
    except OutOfDeviceMemory as error:
        raise ConfigurationError(f"the KV pool does not fit: {error}; lower max_total_tokens") from error
    return KVPool(arena, layers, num_pages, page_size, *heads)


def choose_num_pages(
    *,
    page_size: int,
    bytes_per_page: int,
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
    too, the pool gets a tenth of what is free now. Sized by memory, the pool is never larger than
    `max_running_requests` full contexts can fill.

    Args:
        free_bytes: free now, with the weights loaded.
        weight_bytes: what they take.

    Raises ConfigurationError, with the bytes, where not one page fits.
    """
    num_fitting = free_bytes // bytes_per_page
    if max_total_tokens is not None:
        num_pages = max_total_tokens // page_size
        if num_pages < 1:
            raise ConfigurationError(
                f"max_total_tokens {max_total_tokens} is less than one page of {page_size} tokens"
            )
        if num_pages > num_fitting:
            raise ConfigurationError(
                f"max_total_tokens {max_total_tokens} needs {num_pages * bytes_per_page} bytes, "
                f"{free_bytes} are free"
            )
        return num_pages
    if mem_fraction_static is not None:
        budget_bytes = int((free_bytes + weight_bytes) * mem_fraction_static) - weight_bytes
    else:
        budget_bytes = int(free_bytes * CPU_KV_FRACTION)
    if budget_bytes < bytes_per_page or num_fitting < 1:
        raise ConfigurationError(
            f"the KV pool may take {max(0, budget_bytes)} bytes ({free_bytes} are free beside {weight_bytes} "
            f"of weights), but one page of {page_size} tokens needs {bytes_per_page}; set "
            "mem_fraction_static higher or page_size lower"
        )
    num_useful = max_running_requests * -(-context_len // page_size)
    return min(budget_bytes // bytes_per_page, num_fitting, num_useful)
