"""The scheduler's process: builds one rank and runs its loop until the process is told to end."""

from __future__ import annotations

import gc
from multiprocessing.connection import Connection

from ebbtide.srt.config import EngineConfig
from ebbtide.srt.device.base import Device
from ebbtide.srt.device.cpu import CpuDevice
from ebbtide.srt.managers.assembly import RankParts, SchedulerConfig, assemble_scheduler
from ebbtide.srt.managers.channel import ChannelAddresses, Receiver, Sender
from ebbtide.srt.managers.control.ports import TagMemory
from ebbtide.srt.managers.engine_weights import EngineWeights
from ebbtide.srt.managers.io_struct import DetokenizerInput, ManagerInput, SchedulerInput
from ebbtide.srt.managers.replication import Inbox
from ebbtide.srt.managers.tag_memory import ArenaMemory, BackedUpWeights
from ebbtide.srt.managers.tokenizer import load_tokenizer
from ebbtide.srt.memory_saver.arena import Arena
from ebbtide.srt.memory_saver.tags import MemoryTag
from ebbtide.srt.model_executor.builder import build_model_runner
from ebbtide.srt.model_executor.model_runner import ModelRunner


def run_scheduler_process(config: EngineConfig, addresses: ChannelAddresses, ready: Connection) -> None:
    """Build the rank, say that it is ready, and turn the loop. Does not return.

    Args:
        ready: gets one dictionary, `status: "ready"` and what the API process needs to know:
            `max_total_num_tokens`, the size of the KV pool, and `max_req_input_len`, the longest prompt that
            leaves room for an output token.

    Raises:
        ConfigurationError: the model, the checkpoint or a size does not do.
    """
    device = CpuDevice()
    inbox_end: Receiver[SchedulerInput] = Receiver(addresses.scheduler, SchedulerInput)
    manager: Sender[ManagerInput] = Sender(addresses.manager)
    outputs: Sender[DetokenizerInput] = Sender(
        addresses.manager if config.model.skip_tokenizer_init else addresses.detokenizer
    )
    runner = build_model_runner(config.model, config.cache, config.schedule, config.runtime, device)
    scheduler = assemble_scheduler(
        SchedulerConfig.of(config), rank_parts(config, runner, device), Inbox(inbox_end, manager), outputs
    )
    # What has been built stays: keep the collector from walking it in the middle of a step.
    gc.collect()
    gc.freeze()
    max_total_tokens = runner.kv_pool.num_pages * runner.kv_pool.page_size
    ready.send(
        {
            "status": "ready",
            "max_total_num_tokens": max_total_tokens,
            "max_req_input_len": min(config.model.context_len, max_total_tokens) - 1,
        }
    )
    scheduler.run()


def rank_parts(config: EngineConfig, runner: ModelRunner, device: Device) -> RankParts:
    """What the scheduler of a rank works with, over a model runner."""
    return RankParts(
        runner=runner,
        num_pages=runner.kv_pool.num_pages,
        table=runner.page_table,
        memories=_memories(config, runner, device),
        weights=EngineWeights(runner.weight_store, config),
        free_bytes=device.free_bytes,
        device=device.name,
        tokenizer=None if config.model.skip_tokenizer_init else load_tokenizer(config.model),
    )


def _memories(config: EngineConfig, runner: ModelRunner, device: Device) -> dict[MemoryTag, TagMemory]:
    keeps_weights = config.memory.enable_weights_cpu_backup
    weights = (
        BackedUpWeights(runner.weight_store) if keeps_weights else ArenaMemory(runner.weight_store.arena)
    )
    # A CPU has no graphs to capture: its tag has both states, and no bytes.
    cuda_graph = Arena(MemoryTag.CUDA_GRAPH, 0, device.virtual_memory())
    cuda_graph.resume()
    return {
        MemoryTag.WEIGHTS: weights,
        MemoryTag.KV_CACHE: ArenaMemory(runner.kv_pool.arena),
        MemoryTag.CUDA_GRAPH: ArenaMemory(cuda_graph),
    }
