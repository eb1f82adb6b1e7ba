"""The layout and size of a rank's KV pool, and its scales at the start."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ebbtide.formats.stored_tensor import whole
from ebbtide.srt.config import CacheConfig, EngineConfig, ModelConfig, ScheduleConfig
from ebbtide.srt.distributed import Division, part_of
from ebbtide.srt.distributed.parallel_group import ParallelGroup
from ebbtide.srt.errors import ConfigurationError, OutOfDeviceMemory, first_few
from ebbtide.srt.mem_cache import CacheGroups, CacheSpec, Paged, State, TokenSpec
from ebbtide.srt.mem_cache.kv_pool import (
    CUDA_MIN_RUN_BYTES,
    MIN_CHUNK_PAGES,
    KVLayout,
    KVPool,
    StateLayout,
    StatePool,
    cuda_chunk_bytes,
)
from ebbtide.srt.mem_cache.kv_scales import FP8, KVScales, scale_place
from ebbtide.srt.mem_cache.state_slots import StateSlots
from ebbtide.srt.memory_saver import MemoryTag
from ebbtide.srt.memory_saver.arena import round_up
from ebbtide.srt.memory_saver.saver import ArenaSource, MemorySaver
from ebbtide.srt.model_executor.loader import Checkpoint

logger = logging.getLogger(__name__)

CPU_KV_FRACTION = 0.1
# How many state checkpoints there are: each is as large as the state of a running request.
ROWS_PER_CHECKPOINT, MIN_CHECKPOINTS = 4, 8
# The share of the memory for states and pages that states may take if max_running_requests is not given.
STATE_SHARE = 0.5
CHECKPOINT_TOKENS = 2048
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KV_DTYPES = DTYPES | {"fp8_e4m3": FP8}


def cache_groups(specs: Sequence[CacheSpec], context_len: int) -> CacheGroups:
    """Group the layers that store each token. A window that no request can exceed is dropped."""

    def within(spec: TokenSpec) -> TokenSpec:
        if isinstance(spec, Paged) and (spec.window or 0) >= context_len:
            return replace(spec, window=None)
        return spec

    return CacheGroups.of([within(spec) for spec in specs if not isinstance(spec, State)])


def kv_layout(
    groups: CacheGroups,
    spec: TokenSpec,
    cache_config: CacheConfig,
    saver: MemorySaver,
    device_bytes: int | None,
) -> KVLayout:
    """The layout of this rank's pages.

    Args:
        spec: what a layer stores per token on this rank.
        device_bytes: memory of the GPU; None for the CPU.
    """
    layout = KVLayout(
        num_layers=groups.layers_per_group,
        page_size=cache_config.page_size,
        spec=spec,
        dtype=KV_DTYPES[cache_config.dtype],
        granularity=saver.granularity,
        min_chunk_pages=MIN_CHUNK_PAGES,
    )
    if device_bytes is None:
        return layout
    num_tokens = cache_config.max_total_tokens
    pool_bytes = None
    if num_tokens is not None:
        pool_bytes = num_tokens // layout.page_size * len(groups.windows) * layout.page_bytes
    chunk_bytes = cuda_chunk_bytes(device_bytes, pool_bytes)
    run_bytes = CUDA_MIN_RUN_BYTES
    if pool_bytes is not None:  # In a small pool, more chunks matter more than long runs.
        run_bytes = min(run_bytes, chunk_bytes // layout.num_planes)
    return replace(layout, min_chunk_bytes=chunk_bytes, min_run_bytes=run_bytes)


def build_kv_pool(
    layout: KVLayout,
    groups: CacheGroups,
    config: EngineConfig,
    arenas: ArenaSource,
    group: ParallelGroup,
    *,
    free_bytes: int,
    weight_bytes: int,
    scales: KVScales | None = None,
    states: Sequence[State] = (),
) -> KVPool:
    """A resident pool. Its size is what `choose_num_pages` says on the rank with the least room.

    Args:
        states: the specs of layers with a recurrent state, with the sizes of all ranks together.
    """
    state_layout = StateLayout.of(states, group.size, layout.page_bytes)
    schedule_config, cache_config = config.schedule, config.cache
    budget_bytes = choose_budget(cache_config, free_bytes, weight_bytes)
    num_rows, num_slots = schedule_config.max_running_requests, 0
    if states:
        room_bytes = free_bytes
        if schedule_config.fits_running:
            room_bytes = _room_for_states(layout, len(groups.windows), cache_config, budget_bytes)
        num_rows = group.smallest(choose_num_rows(schedule_config, cache_config, state_layout, room_bytes))
        num_slots = num_rows + 1 + _num_checkpoints(num_rows, cache_config)
    state_bytes = round_up(num_slots * state_layout.slot_bytes, layout.chunk_bytes)
    num_pages = choose_num_pages(
        layout,
        num_groups=len(groups.windows),
        free_bytes=free_bytes - state_bytes,
        budget_bytes=budget_bytes - state_bytes,
        max_total_tokens=cache_config.max_total_tokens,
        max_running_requests=num_rows,
        context_len=config.model.context_len,
    )
    num_pages = group.smallest(num_pages)
    try:
        kv_bytes = layout.arena_bytes(num_pages)
        arena = arenas.arena(MemoryTag.KV_CACHE, kv_bytes + state_bytes, layout.chunk_bytes)
        arena.resume()
    except OutOfDeviceMemory as error:
        raise ConfigurationError(f"the KV pool does not fit: {error}; lower max_total_tokens") from error
    logger.info(
        "KV cache: pages=%d page_size=%d bytes=%d states=%d state_bytes=%d free_bytes_before=%d",
        num_pages,
        layout.page_size,
        arena.num_bytes,
        num_slots,
        state_bytes,
        free_bytes,
    )
    state_pool = None
    if states:
        slots = StateSlots(
            num_rows,
            num_slots - num_rows - 1,
            interval=round_up(CHECKPOINT_TOKENS, layout.page_size),
            first_page=layout.num_chunks(num_pages) * layout.chunk_blocks,
            pages_per_slot=state_layout.slot_pages,
        )
        state_pool = StatePool(arena, kv_bytes, state_layout, slots)
    return KVPool(arena, layout, num_pages, groups, scales, state_pool)


def choose_num_rows(
    schedule_config: ScheduleConfig, cache_config: CacheConfig, layout: StateLayout, room_bytes: int
) -> int:
    """How many requests may run, if layers keep a recurrent state of each.

    As many as `max_running_requests`; if that was not given, as many as there is room for.

    Args:
        room_bytes: for their states and for checkpoints.

    Raises ConfigurationError: there is no room for them, or not even for one. It names the bytes.
    """
    most = schedule_config.max_running_requests

    def num_bytes(num_rows: int) -> int:
        return (num_rows + 1 + _num_checkpoints(num_rows, cache_config)) * layout.slot_bytes

    least = 1 if schedule_config.fits_running else most
    for num_rows in range(most, least - 1, -1):
        if num_bytes(num_rows) <= room_bytes:
            if num_rows < most:
                logger.warning(
                    "at most %d requests run at once: their states take %d bytes each, and there is no room "
                    "for %d beside the KV cache; max_running_requests says how many it is to be",
                    num_rows,
                    layout.slot_bytes,
                    most,
                )
            return num_rows
    raise ConfigurationError(
        f"the states of {least} requests and {_num_checkpoints(least, cache_config)} checkpoints need "
        f"{num_bytes(least)} bytes, {max(0, room_bytes)} are there for them: lower max_running_requests or "
        "max_total_tokens, or set mem_fraction_static higher"
    )


def _num_checkpoints(num_rows: int, cache_config: CacheConfig) -> int:
    return max(MIN_CHECKPOINTS, num_rows // ROWS_PER_CHECKPOINT) if cache_config.enable_prefix_cache else 0


def _room_for_states(layout: KVLayout, num_groups: int, cache_config: CacheConfig, budget_bytes: int) -> int:
    """The bytes that states may take beside the pages, in whole chunks."""
    if cache_config.max_total_tokens is None:
        room_bytes = int(budget_bytes * STATE_SHARE)
    else:
        num_pages = cache_config.max_total_tokens // layout.page_size * num_groups
        room_bytes = budget_bytes - layout.arena_bytes(num_pages)
    return room_bytes // layout.chunk_bytes * layout.chunk_bytes


def choose_budget(cache_config: CacheConfig, free_bytes: int, weight_bytes: int) -> int:
    """The bytes that pages and states may take beside the weights.

    Weights, pages and states together get `mem_fraction_static` of the memory that was free before the
    weights were loaded. Pages and states get at least `least_pool_share` of what is free now. Without a
    fraction they get a tenth of what is free now.

    Args:
        free_bytes: this rank's share of the free memory, with the weights loaded.
        weight_bytes: bytes of the weights.
    """
    fraction = cache_config.mem_fraction_static
    if fraction is None:
        return int(free_bytes * CPU_KV_FRACTION)
    left_bytes = int((free_bytes + weight_bytes) * fraction) - weight_bytes
    return min(free_bytes, max(0, left_bytes, int(free_bytes * cache_config.least_pool_share)))


def choose_num_pages(
    layout: KVLayout,
    *,
    num_groups: int = 1,
    free_bytes: int,
    budget_bytes: int,
    max_total_tokens: int | None,
    max_running_requests: int,
    context_len: int,
) -> int:
    """How many pages the KV pool gets. Each token counts in every group of layers, as if without windows.

    `max_total_tokens` is rounded down to whole pages. Without it, the pool gets as many whole chunks as fit,
    but no more than `max_running_requests` full contexts can fill.

    Args:
        free_bytes: this rank's share of the free memory, with the weights loaded, less the states.
        budget_bytes: from `choose_budget`, less the states.

    Raises ConfigurationError: not even one chunk fits. It names the bytes.
    """
    page_size, chunk_bytes = layout.page_size, layout.chunk_bytes
    if max_total_tokens is not None:
        num_pages = max_total_tokens // page_size * num_groups
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
    num_chunks = budget_bytes // chunk_bytes
    if num_chunks < 1:
        raise ConfigurationError(
            f"the KV pool may take {max(0, budget_bytes)} bytes ({free_bytes} are free), but one chunk of "
            f"{layout.chunk_pages} pages of {page_size} tokens needs {chunk_bytes}; set mem_fraction_static "
            "higher or page_size lower"
        )
    num_useful = max_running_requests * -(-context_len // page_size) * num_groups
    return min(num_chunks * layout.chunk_pages, num_useful)


def build_kv_scales(
    model_config: ModelConfig, cache_config: CacheConfig, group: ParallelGroup, device: torch.device
) -> KVScales | None:
    """The scales of an FP8 KV cache; None: all are 1 and fixed.

    Args:
        model_config: with the numbers of heads of all ranks together.

    Raises ConfigurationError as `checkpoint_scales`.
    """
    if cache_config.dtype != "fp8_e4m3":
        return None
    scales_G2K = checkpoint_scales(model_config.path, model_config.load_format, model_config, group)
    is_calibrated = cache_config.scales != "checkpoint"
    found = "1" if scales_G2K is None else "the checkpoint's"
    logger.info("KV cache in FP8: scales=%s%s", found, " until calibrated" if is_calibrated else "")
    if scales_G2K is None:
        if not is_calibrated:
            return None
        _, count = _heads_of(model_config, group)
        scales_G2K = torch.ones((model_config.num_layers, 2, count))
    tokens = cache_config.calibration_tokens if is_calibrated else 0
    return KVScales(
        scales_G2K.to(device), calibration_tokens=tokens, keeps_up=cache_config.scales == "recalibrate"
    )


def checkpoint_scales(
    path: str, load_format: str, config: ModelConfig, group: ParallelGroup
) -> Tensor | None:
    """A checkpoint's scales of this rank's heads, [layers, 2, K]; None: it has none.

    Args:
        config: with the numbers of heads of all ranks together.

    Raises ConfigurationError: a scale is missing, there twice, of another shape, or not a finite number above
    0.
    """
    if load_format == "dummy":
        return None
    checkpoint = Checkpoint(path, load_format)
    places = {name: place for name in checkpoint.entries if (place := scale_place(name)) is not None}
    if not places:
        return None
    _require_one_each(path, Counter(places.values()), config.num_layers)
    first, count = _heads_of(config, group)
    scales_G2K = torch.ones((config.num_layers, 2, count))
    for name, tensor in checkpoint.tensors():
        if name in places:
            scales_K = _per_head(name, whole(tensor), config.num_kv_heads)
            scales_G2K[places[name]] = scales_K[first : first + count]
    return scales_G2K


def _heads_of(config: ModelConfig, group: ParallelGroup) -> tuple[int, int]:
    """The first KV head of this rank, and how many it has."""
    return part_of(group.rank, group.size, config.num_kv_heads, Division.SHARED, "num_key_value_heads")


def _require_one_each(path: str, found: Counter[tuple[int, int]], num_layers: int) -> None:
    """Raises ConfigurationError unless each layer of the model has one scale for keys and one for values."""
    wanted = Counter((layer, side) for layer in range(num_layers) for side in range(2))
    if found == wanted:
        return
    problems = [
        f"layer {layer}: expected {wanted[layer, side]} {'kv'[side]}_scale, found {found[layer, side]}"
        for layer, side in sorted(wanted | found)
        if wanted[layer, side] != found[layer, side]
    ]
    raise ConfigurationError(f"{path}: scales of the KV cache: {first_few(problems)}")


def _per_head(name: str, scale: Tensor, num_kv_heads: int) -> Tensor:
    """One scale for each KV head, float32."""
    if scale.numel() not in (1, num_kv_heads):
        raise ConfigurationError(
            f"{name}: expected one number, or one for each of {num_kv_heads} KV heads, "
            f"got shape {list(scale.shape)}"
        )
    scales_K = scale.float().flatten().expand(num_kv_heads)
    if not bool((scales_K.isfinite() & (scales_K > 0)).all()):
        raise ConfigurationError(f"{name}: expected finite numbers above 0, got {scales_K.tolist()}")
    return scales_K
