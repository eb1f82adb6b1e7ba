"""Ebbtide's `ServerArgs`, and the other names of SGLang's module."""

from __future__ import annotations

import argparse
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from ebbtide.srt.server_args import ServerArgs as ServerArgs
from sglang.srt.utils.common import get_open_port


@dataclass
class PortArgs:
    """Addresses as SGLang has them. Nothing listens there: Ebbtide's processes have their own."""

    tokenizer_ipc_name: str
    scheduler_input_ipc_name: str
    detokenizer_ipc_name: str
    rpc_ipc_name: str
    metrics_ipc_name: str
    nccl_port: int

    @classmethod
    def init_new(cls, server_args: ServerArgs, dp_rank: int | None = None) -> Self:
        """Make addresses that are free now."""
        first, second, third, fourth, fifth = (f"ipc:///tmp/{uuid.uuid4()}" for _ in range(5))
        port = server_args.nccl_port if server_args.nccl_port is not None else get_open_port()
        return cls(first, second, third, fourth, fifth, nccl_port=port)


def prepare_server_args(argv: Sequence[str]) -> ServerArgs:
    """Parse a command line. SystemExit: a usage error."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    return ServerArgs.from_cli_args(parser.parse_args(argv))
