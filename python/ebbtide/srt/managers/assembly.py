"""Assembles a scheduler from its parts: the real ones in a process, or others in tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from msgspec import structs

from ebbtide.srt.config import EngineConfig
from ebbtide.srt.managers.control import HandlerTable, PageStore, TagMemory
from ebbtide.srt.managers.control.adapter_loads import AdapterLoads, AdapterMemory
from ebbtide.srt.managers.control.adapters import AdapterBook
from ebbtide.srt.managers.control.control_plane import ControlPlane
from ebbtide.srt.managers.control.kv_cache import CacheFlush, KVSize
from ebbtide.srt.managers.control.memory_occupation import MemoryOccupation, WeightContent
from ebbtide.srt.managers.control.operations import Operations
from ebbtide.srt.managers.control.pace import Pace, Ranks
from ebbtide.srt.managers.control.pause import Generation
from ebbtide.srt.managers.control.weights import Weights
from ebbtide.srt.managers.control.weights.checks import WeightChecks
from ebbtide.srt.managers.control.weights.update import WeightUpdates
from ebbtide.srt.managers.io_struct import DetokenizerInput, GetLoadReqInput, GetLoadReqOutput, RankReport
from ebbtide.srt.managers.scheduler import Scheduler
from ebbtide.srt.managers.scheduling.kv_chunks import ChunkMemory, KVChunks
from ebbtide.srt.managers.scheduling.live_requests import LiveRequests, SchedulerTrialPass, TimeLimits
from ebbtide.srt.managers.scheduling.load_meter import LoadMeter
from ebbtide.srt.managers.scheduling.lockstep import RankInbox
from ebbtide.srt.managers.scheduling.output_processor import OutputProcessor
from ebbtide.srt.managers.scheduling.request_pages import RequestPages
from ebbtide.srt.managers.scheduling.schedule_policy import SchedulePolicy
from ebbtide.srt.managers.text.grammar import GrammarShelf, Vocabulary
from ebbtide.srt.managers.text.tokenizer import Tokenizer
from ebbtide.srt.managers.wire.channel import SendEnd
from ebbtide.srt.mem_cache import WHOLE, Windows
from ebbtide.srt.mem_cache.page_allocator import PageAllocator, PageIds, PageTable
from ebbtide.srt.mem_cache.radix_cache import RadixCache
from ebbtide.srt.mem_cache.state_slots import Checkpoints, StateSlots
from ebbtide.srt.memory_saver import MemoryTag
from ebbtide.srt.model_executor.batch_plan import Runner

if TYPE_CHECKING:
    from ebbtide.srt.mem_cache.kv_scales import KVScales


@dataclass(frozen=True)
class RankParts:
    """The parts of one rank.

    Attributes:
        num_pages: size of the KV pool.
        table: the page table that the runner reads.
        memories: the memory of every tag.
        page_store: keeps pages in host memory.
        free_bytes: gives the device memory that is free now.
        uuid: of the device; None: it is the CPU.
        tokenizer: None: the engine handles token ids only.
        page_ids: the ids of the pool's pages; None: 0, 1, 2, ...
        windows: sliding window of each group of layers.
        state_slots: of recurrent states; None: no layer has one.
        kv_memory: the KV pool's memory, if chunks of it can be lent and removed; else None.
        num_weight_chunks: chunks that a second copy of the weights takes, on the rank where it takes most.
        kv_scales: of a KV pool in FP8; else None.
        gc_pause_s: gives how long Python's garbage collector has stopped this process so far.
        adapters: slots of adapters; None: adapters are not enabled.
    """

    runner: Runner
    num_pages: int
    table: PageTable
    memories: Mapping[MemoryTag, TagMemory]
    page_store: PageStore
    weights: Weights
    free_bytes: Callable[[], int]
    device: str
    uuid: str | None
    tokenizer: Tokenizer | None
    page_ids: PageIds | None = None
    windows: Windows = WHOLE
    state_slots: StateSlots | None = None
    kv_memory: ChunkMemory | None = None
    num_weight_chunks: int = 0
    kv_scales: KVScales | None = None
    gc_pause_s: Callable[[], float] = lambda: 0.0
    adapters: AdapterMemory | None = None


def assemble_scheduler(
    config: EngineConfig, parts: RankParts, inbox: RankInbox, outputs: SendEnd[DetokenizerInput]
) -> Scheduler:
    """Connect the policy, the control plane and the loop of one rank."""
    allocator = PageAllocator(parts.num_pages, parts.page_ids)
    states = None if parts.state_slots is None else Checkpoints(parts.state_slots)
    args, page_size = config.server_args, config.cache.page_size
    cache = RadixCache(
        allocator, page_size, parts.windows, states, is_enabled=config.cache.enable_prefix_cache
    )
    pages = RequestPages(
        allocator,
        cache,
        parts.table,
        page_size,
        parts.page_store,
        parts.windows,
        states,
        cache_by_version=config.server_args.prefix_cache_scope == "version",
        records_routes=config.server_args.enable_return_routed_experts,
    )
    num_slots = 0 if parts.adapters is None else parts.adapters.num_slots
    book = AdapterBook(
        num_slots,
        args.lora_keep_versions,
        args.max_loaded_loras,
        config.model.names_answered,
        # A share of the batch: with smaller turns, rows of the batch would stay empty.
        turn=-(-config.schedule.max_running_requests // max(1, num_slots - 1)),
    )
    # As many requests may run as the page table has rows.
    schedule = replace(config.schedule, max_running_requests=parts.table.spare_row)
    policy = SchedulePolicy(schedule, pages, book)
    # All ranks of a replica make the same passes, so only the first one logs them.
    meter = LoadMeter(policy, config.schedule.decode_log_interval if inbox.tp_rank == 0 else 0)
    processor = OutputProcessor(policy, meter, inbox.dp_rank)
    requests = LiveRequests(policy, processor, outputs, parts.kv_scales)
    pace = Pace()
    may_retract = args.update_staging == "always"
    chunks = KVChunks(policy, parts.kv_memory, parts.num_weight_chunks, may_retract=may_retract)
    control = _control_plane(config, parts, requests, inbox, meter, pace, chunks, policy)
    eos_token_ids = config.model.eos_token_ids
    if parts.tokenizer is not None:
        eos_token_ids |= parts.tokenizer.eos_token_ids
    return Scheduler(
        inbox,
        outputs,
        policy,
        processor,
        requests,
        TimeLimits(config.schedule, policy, requests, inbox.set_deadline),
        parts.runner,
        control,
        pace,
        meter,
        tokenizer=parts.tokenizer,
        eos_token_ids=eos_token_ids,
        overlap=config.schedule.overlap,
        grammars=None
        if parts.tokenizer is None
        else GrammarShelf(Vocabulary(parts.tokenizer, config.model.vocab_size, eos_token_ids)),
    )


def _trial_pass(
    config: EngineConfig, parts: RankParts, policy: SchedulePolicy, ranks: Ranks
) -> SchedulerTrialPass:
    longest = config.schedule.chunked_prefill_size or config.schedule.max_prefill_tokens
    return SchedulerTrialPass(
        policy,
        parts.table,
        parts.runner,
        ranks,
        max_tokens=min(longest, config.model.context_len),
        vocab_size=config.model.vocab_size,
        kv_scales=parts.kv_scales,
    )


def _control_plane(
    config: EngineConfig,
    parts: RankParts,
    requests: LiveRequests,
    inbox: RankInbox,
    meter: LoadMeter,
    pace: Pace,
    chunks: KVChunks,
    policy: SchedulePolicy,
) -> ControlPlane:
    operations = Operations(inbox.reply)
    generation = Generation(requests, operations)
    memory = MemoryOccupation(
        parts.memories,
        chunks,
        parts.page_store,
        WeightContent(parts.weights.names),
        requests,
        parts.free_bytes,
        inbox.ranks,
        pace,
        operations.go_on,
        is_enabled=config.server_args.memory_saver_backend != "none",
    )
    updates = WeightUpdates(
        parts.weights,
        chunks,
        memory,
        generation,
        requests,
        operations,
        inbox.ranks,
        inbox.set_deadline,
        pace,
        inbox.wake,
        _trial_pass(config, parts, policy, inbox.ranks),
        version=config.server_args.weight_version,
        model_path=config.model.path,
        load_format=config.model.load_format,
        timeout_s=config.server_args.weight_update_timeout_s,
    )
    others = (
        CacheFlush(requests).handlers,
        KVSize(chunks, memory, requests, parts.free_bytes, inbox.ranks).handlers,
        WeightChecks(parts.weights, memory, inbox.ranks, pace, lambda: updates.is_under_way).handlers,
        _load_reports(parts, inbox, meter, generation, chunks, operations),
    )
    return ControlPlane(
        generation,
        memory,
        updates,
        AdapterLoads(
            parts.adapters,
            policy.adapters,
            memory,
            updates,
            requests,
            operations,
            inbox.ranks,
            pace,
        ),
        operations,
        inbox.ranks,
        others,
        RankReport(
            dp_rank=inbox.dp_rank,
            tp_rank=inbox.tp_rank,
            pid=os.getpid(),
            device=parts.device,
            uuid=parts.uuid,
            tags={},
        ),
        parts.weights.group_names,
        inbox.reply,
        inbox.set_deadline,
    )


def _load_reports(
    parts: RankParts,
    inbox: RankInbox,
    meter: LoadMeter,
    generation: Generation,
    chunks: KVChunks,
    operations: Operations,
) -> HandlerTable:
    def report(request: GetLoadReqInput) -> GetLoadReqOutput:
        load = structs.replace(
            # While generation is paused, running requests count as paused.
            meter.load(inbox.dp_rank, is_paused=generation.paused is not None),
            lent_bytes=chunks.lent_bytes,
            gc_pause_s=parts.gc_pause_s(),
            stalls=operations.stalls.report(),
        )
        return GetLoadReqOutput(loads=[load])

    return {GetLoadReqInput: report}
