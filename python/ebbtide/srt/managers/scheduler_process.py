"""A scheduler's process: builds one rank and runs its loop, with a watchdog that ends it if it hangs."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Final

import torch

from ebbtide.srt.config import EngineConfig
from ebbtide.srt.device import Device, open_device
from ebbtide.srt.distributed.parallel_group import join_parallel_group
from ebbtide.srt.errors import HUNG_EXIT_STATUS
from ebbtide.srt.kernel_cache import keep_kernels_in
from ebbtide.srt.layers.attention.registry import name_of
from ebbtide.srt.managers.assembly import RankParts, assemble_scheduler
from ebbtide.srt.managers.control import TagMemory
from ebbtide.srt.managers.scheduling.adapter_io import EngineAdapters
from ebbtide.srt.managers.scheduling.lockstep import open_rank_channels
from ebbtide.srt.managers.scheduling.weight_io import EngineWeights
from ebbtide.srt.managers.text.tokenizer import load_tokenizer
from ebbtide.srt.managers.wire.channel import ChannelAddresses
from ebbtide.srt.mem_cache.page_store import HostPageStore
from ebbtide.srt.memory_saver import MemoryTag
from ebbtide.srt.memory_saver.backup import ArenaMemory, BackedUpMemory, JointMemory
from ebbtide.srt.memory_saver.saver import MemorySaver, open_memory_saver
from ebbtide.srt.memory_saver.virtual_arena import ChunkArena
from ebbtide.srt.memory_saver.virtual_memory import read_host_memory
from ebbtide.srt.model_executor.builder import build_model_runner
from ebbtide.srt.model_executor.model_runner import ModelRunner
from ebbtide.srt.this_process import GcClock, freeze_heap, raise_file_limit
from ebbtide.srt.weight_sync.custom_loader import import_loaders

logger = logging.getLogger(__name__)

PARK_SHARE_OF_HOST = 1 / 8
STAGE_INTERVAL_S = 0.2
# How often the watchdog looks within its limit: it notices a hang at most a tenth too late.
_LOOKS_PER_LIMIT: Final = 10


def run_scheduler_process(config: EngineConfig, addresses: ChannelAddresses, ready: Connection) -> None:
    """Build the rank, report that it is ready, and run the loop. Does not return.

    Args:
        ready: gets the stages, then one dictionary with `status: "ready"` and what the API process needs:
            `max_total_num_tokens`, the size of the KV pool; `max_req_input_len`, the longest prompt that
            leaves room for an output token; `max_running_requests`; `attention_backend`, its name; `experts`,
            the numbers of layers with experts, of experts, and of experts per token (None: the model has
            none).

    Raises:
        ConfigurationError: the model, the checkpoint, a size or a custom weight loader is not possible.
        EngineError: the other ranks of the replica did not start in time.
    """
    stages = StageReports(ready)
    stages("starting the device")
    raise_file_limit()
    keep_kernels_in(config.server_args.kernel_cache_dir)
    # Refuse a wrong path before the model is loaded, which takes minutes.
    import_loaders(config.server_args.custom_weight_loader or ())
    device = open_device(config.runtime.device)
    inbox, outputs = open_rank_channels(config, addresses)
    saver = open_memory_saver(config.server_args.memory_saver_backend, device)
    group = join_parallel_group(
        config.parallel,
        addresses.rendezvous,
        torch.device(device.name),
        config.parallel.dist_timeout_s,
        uses_peer_memory=not config.server_args.disable_custom_all_reduce,
    )
    runner = build_model_runner(config, device, saver, group, stages=stages)
    logger.info("%s", describe_staging(config.server_args.update_staging, runner))
    # Ranks must choose the same requests to park, so all get the same room.
    parts = rank_parts(config, runner, device, saver, park_bytes=group.smallest(_park_bytes(config)))
    scheduler = assemble_scheduler(config, parts, inbox, outputs)
    if scheduler.grammars is not None:
        scheduler.grammars.prepare()
    freeze_heap()
    max_total_tokens = scheduler.policy.tokens_of(runner.kv_pool.num_pages)
    ready.send(
        {
            "status": "ready",
            "max_total_num_tokens": max_total_tokens,
            "max_req_input_len": min(config.model.context_len, max_total_tokens) - 1,
            "max_running_requests": runner.page_table.spare_row,
            "attention_backend": name_of(runner.attention),
            "experts": None if (routed := runner.model.routed) is None else asdict(routed),
        }
    )
    args = config.server_args
    Watchdog(
        lambda: scheduler.activity,
        args.watchdog_timeout,
        args.soft_watchdog_timeout,
        lambda message: end_hung_process(lambda said: _say_last(ready, said), message),
    ).start()
    scheduler.run()


class StageReports:
    """Reports the stages of the start over the pipe. Thread-safe, and rare enough not to fill the pipe."""

    def __init__(self, ready: Connection) -> None:
        self._ready = ready
        self._lock = threading.Lock()
        self._last = "", 0.0

    def __call__(self, what: str, number: int = 0, total: int = 0) -> None:
        now_s = time.monotonic()
        with self._lock:
            what_last, last_s = self._last
            if what == what_last and now_s - last_s < STAGE_INTERVAL_S:
                return
            self._last = what, now_s
            # The parent may have ended.
            with contextlib.suppress(OSError):
                self._ready.send({"status": "stage", "what": what, "number": number, "total": total})


@dataclass(eq=False)
class Watchdog:
    """A thread that checks how long a loop takes for what it is doing.

    Time in which the thread could not run is not counted: then the whole process was stopped (SIGSTOP, a
    frozen container), and the loop too.

    Args:
        activity: gives what the loop is doing, and since when (monotonic seconds); None: it waits for
            messages.
        limit_s: if one activity takes longer, the stacks of all threads are logged, and `end` is called.
        soft_limit_s: if one activity takes longer, that is logged once, with the stacks; None: never.
        end: called with a message, to end the process.
    """

    _activity: Callable[[], tuple[str, float] | None]
    _limit_s: float
    _soft_limit_s: float | None
    _end: Callable[[str], None]

    def __post_init__(self) -> None:
        self._reported: tuple[str, float] | None = None
        self._interval_s = min(self._limit_s, self._soft_limit_s or self._limit_s) / _LOOKS_PER_LIMIT
        self._looked_s = time.monotonic()
        self._seen: tuple[str, float] | None = None
        self._stood_still_s = 0.0

    def start(self) -> None:
        """Start the thread, which runs until the process ends."""
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def look(self) -> None:
        """Compare the loop's activity with the limits."""
        now, current = time.monotonic(), self._activity()
        late_s, self._looked_s = now - self._looked_s - self._interval_s, now
        if current != self._seen:
            self._seen, self._stood_still_s = current, 0.0
        if late_s > self._interval_s:
            self._stood_still_s += late_s
        if current is None:
            return
        what, since_s = current
        taken_s = now - since_s - self._stood_still_s
        if taken_s > self._limit_s:
            message = f"{what} has not ended within {self._limit_s:g} s (--watchdog-timeout)"
            # Log the message first: stacks do not name their process, and several ranks may share a log.
            logger.critical("%s; where every thread stands:", message)
            dump_stacks()
            self._end(message)
        elif self._soft_limit_s is not None and taken_s > self._soft_limit_s and current != self._reported:
            self._reported = current
            logger.error(
                "%s takes longer than %g s (--soft-watchdog-timeout); where every thread stands:",
                *(what, self._soft_limit_s),
            )
            dump_stacks()

    def _run(self) -> None:
        while True:
            time.sleep(self._interval_s)
            self.look()


def dump_stacks() -> None:
    """Write the stacks of all threads of this process to its standard error."""
    faulthandler.dump_traceback(file=sys.stderr, all_threads=True)


def end_hung_process(say: Callable[[str], None], message: str) -> None:
    """End this process at once, even if its other threads hang."""
    logger.critical("the process ends: %s", message)
    say(message)
    os._exit(HUNG_EXIT_STATUS)


def _say_last(ready: Connection, message: str) -> None:
    # The parent may have ended.
    with contextlib.suppress(OSError):
        ready.send({"status": "crashed", "message": message})


def rank_parts(
    config: EngineConfig, runner: ModelRunner, device: Device, saver: MemorySaver, *, park_bytes: int = 0
) -> RankParts:
    """The parts of a rank's scheduler, for this model runner.

    Args:
        park_bytes: host memory for KV that survives a release of the pool.
    """
    arena, args = runner.kv_pool.arena, config.server_args
    page_store = HostPageStore(runner.kv_pool, park_bytes, device.host_pinning())
    if args.kv_park_bytes is not None:
        page_store.allocate()
    gc_clock = GcClock()
    gc_clock.start()
    weights = EngineWeights(runner.weight_store, config, device)
    return RankParts(
        runner=runner,
        gc_pause_s=lambda: gc_clock.paused_s,
        num_pages=runner.kv_pool.num_pages,
        page_ids=runner.kv_pool.layout.page_ids,
        windows=runner.kv_pool.groups.windows,
        state_slots=None if runner.kv_pool.states is None else runner.kv_pool.states.slots,
        kv_memory=arena if isinstance(arena, ChunkArena) else None,
        num_weight_chunks=0 if args.update_staging == "never" else runner.weight_store.num_chunks,
        kv_scales=runner.kv_pool.scales,
        table=runner.page_table,
        memories=_memories(config, runner, device, saver),
        page_store=page_store,
        weights=weights,
        adapters=None
        if runner.adapters is None
        else EngineAdapters(
            runner.adapters, weights.reader, device, refuses_nonfinite=weights.refuses_nonfinite
        ),
        free_bytes=device.free_bytes,
        device=device.name,
        uuid=device.uuid,
        tokenizer=None if config.server_args.skip_tokenizer_init else load_tokenizer(config.model),
    )


def describe_staging(staging: str, runner: ModelRunner) -> str:
    """A sentence that says how updates are written, and where a second copy of the weights finds memory."""
    num_bytes = runner.weight_store.num_bytes
    if staging == "never":
        return f"weight updates are written in place (update_staging=never): bytes={num_bytes}"
    kv_pool, num_needed = runner.kv_pool, runner.weight_store.num_chunks
    num_chunks = kv_pool.layout.num_chunks(kv_pool.num_pages)
    if not isinstance(kv_pool.arena, ChunkArena):
        source = "free device memory alone: this memory_saver_backend cannot move memory between tags"
    elif num_needed < num_chunks:
        source = f"{num_needed} of {num_chunks} chunks of the KV cache, or free device memory"
    else:
        source = f"free device memory: the KV cache has {num_chunks} chunks, too few to lend"
    without = "are refused" if staging == "always" else "are written in place"
    return (
        f"weight updates use a second copy of the weights: bytes={num_bytes} from {source}; without room for "
        f"one they {without} (update_staging={staging})"
    )


def _park_bytes(config: EngineConfig) -> int:
    """Host memory that this rank may use for KV while the pool is released."""
    if config.server_args.kv_park_bytes is not None:
        return config.server_args.kv_park_bytes
    parallel = config.parallel
    num_ranks = max(1, parallel.tp_size * parallel.dp_size // parallel.nnodes)
    return int(read_host_memory().total_bytes * PARK_SHARE_OF_HOST) // num_ranks


def _memories(
    config: EngineConfig, runner: ModelRunner, device: Device, saver: MemorySaver
) -> dict[MemoryTag, TagMemory]:
    store = runner.weight_store
    if runner.graphs is not None:
        cuda_graph = runner.graphs.arena
    else:
        # Without graphs, an empty arena: the tag can still be released and resumed.
        cuda_graph = saver.arena(MemoryTag.CUDA_GRAPH, 0)
        cuda_graph.resume()
    keeps_weights = config.server_args.enable_weights_cpu_backup
    base = BackedUpMemory(
        store.arena, lambda: store.generation, device.host_pinning(), keeps_contents=keeps_weights
    )
    weights: TagMemory = base
    if (adapters := runner.adapters) is not None:
        # Adapters are always kept, even if the weights are not.
        kept = BackedUpMemory(
            adapters.arena, lambda: adapters.generation, device.host_pinning(), keeps_contents=True
        )
        weights = JointMemory(base, kept)
    return {
        MemoryTag.WEIGHTS: weights,
        # With the cache, also free the memory of activations that torch's allocator keeps.
        MemoryTag.KV_CACHE: ArenaMemory(runner.kv_pool.arena, device.trim),
        MemoryTag.CUDA_GRAPH: ArenaMemory(cuda_graph, is_needed=False),
    }
