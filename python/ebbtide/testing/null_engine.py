"""An engine and a server without a model: real processes, channels and HTTP around null parts.

Prompts are token ids below `NullRunner.VOCAB_SIZE`. Weights are updated by `update_weights_from_disk`, whose
`model_path` is the integer to write, see `NullWeights`. `python -m ebbtide.testing.null_engine --port 30000`
starts a server.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from ebbtide.srt.config import EngineConfig
from ebbtide.srt.entrypoints.engine import Engine
from ebbtide.srt.entrypoints.http_server import serve
from ebbtide.srt.entrypoints.launch.console import Stopped, configure_logging
from ebbtide.srt.entrypoints.service import EngineService
from ebbtide.srt.errors import EbbtideError
from ebbtide.srt.managers.assembly import RankParts, assemble_scheduler
from ebbtide.srt.managers.scheduling.lockstep import open_rank_channels
from ebbtide.srt.managers.wire.channel import ChannelAddresses
from ebbtide.srt.mem_cache.page_allocator import PageTable
from ebbtide.srt.server_args import ServerArgs
from ebbtide.testing.null_kv import NullDevice, NullPageStore
from ebbtide.testing.null_runner import POOL_TOKENS, NullRunner, null_args, null_config
from ebbtide.testing.null_weights import NullWeights, null_memories

DEVICE_BYTES = 10_000
TARGETS = {"scheduler": "ebbtide.testing.null_engine:run_null_scheduler"}


class NullEngine(Engine):
    """An `Engine` without a model. It starts in about a second.

    Args:
        **kwargs: fields of `ServerArgs`; those about the model and its tokenizer have no effect.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(server_args=null_args(**kwargs))

    @classmethod
    def _start(cls, server_args: ServerArgs) -> EngineService:
        return EngineService(null_config(server_args), TARGETS)


def null_parts(config: EngineConfig, weights: NullWeights) -> RankParts:
    """Make the parts of a rank without a model."""
    page_size = config.cache.page_size
    num_pages = (config.cache.max_total_tokens or POOL_TOKENS) // page_size
    device = NullDevice(DEVICE_BYTES)
    return RankParts(
        runner=weights.runner,
        num_pages=num_pages,
        table=PageTable(config.schedule.max_running_requests, -(-config.model.context_len // page_size)),
        memories=null_memories(device, weights, keeps_weights=config.server_args.enable_weights_cpu_backup),
        page_store=NullPageStore(num_pages),
        weights=weights,
        free_bytes=lambda: device.free_bytes,
        device="null",
        uuid=None,
        tokenizer=None,
    )


def run_null_scheduler(
    config: EngineConfig, addresses: ChannelAddresses, ready: Connection, runner: NullRunner | None = None
) -> None:
    """Run a scheduler process on null parts. Does not return.

    Args:
        ready: gets the message that the scheduler is ready.
        runner: None: a new one.
    """
    inbox, outputs = open_rank_channels(config, addresses)
    parts = null_parts(config, NullWeights(NullRunner() if runner is None else runner))
    max_total_tokens = parts.num_pages * config.cache.page_size
    scheduler = assemble_scheduler(config, parts, inbox, outputs)
    longest = min(config.model.context_len, max_total_tokens) - 1
    ready.send({"status": "ready", "max_total_num_tokens": max_total_tokens, "max_req_input_len": longest})
    scheduler.run()


def main(argv: Sequence[str] | None = None) -> int:
    """Serve an engine without a model until stopped; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m ebbtide.testing.null_engine", description=main.__doc__)
    ServerArgs.add_cli_args(parser)
    parser.set_defaults(**vars(null_args()))
    for action in parser._actions:
        action.required = False
    args = ServerArgs.from_cli_args(parser.parse_args(argv))
    configure_logging(args, "server")
    try:
        serve(lambda: null_config(args), TARGETS)
    except Stopped:
        return 130
    except EbbtideError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
