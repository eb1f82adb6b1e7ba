"""An engine that can be told to read shared prefixes once per request, in between its calls."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ebbtide import Engine
from ebbtide.srt.config import EngineConfig, resolve
from ebbtide.srt.entrypoints.launch.early_processes import EarlyProcesses
from ebbtide.srt.entrypoints.service import EngineService
from ebbtide.srt.layers.attention.flashinfer import FlashInferAttention
from ebbtide.srt.managers.scheduler_process import run_scheduler_process
from ebbtide.srt.managers.wire.channel import ChannelAddresses
from ebbtide.srt.server_args import ServerArgs

# A folder in which the file `off` stands while nothing is to be shared, and `refused` once that took effect.
FOLDER = "EBBTIDE_BENCH_SHARING"


class SharingEngine(Engine):
    """An engine for `unshared`, and otherwise like any other. Within `sharing_folder` only."""

    @classmethod
    def _start(cls, server_args: ServerArgs) -> EngineService:
        targets = {"scheduler": f"{__name__}:run_scheduler"}
        with EarlyProcesses(server_args) as early:
            return EngineService(resolve(server_args), targets, early)


def run_scheduler(config: EngineConfig, addresses: ChannelAddresses, ready: Connection) -> None:
    """The scheduler's process, in which sharing hangs on a file. Asked only where a step has new requests."""
    off, refused = (Path(os.environ[FOLDER]) / name for name in ("off", "refused"))
    is_worth_sharing = FlashInferAttention.is_worth_sharing

    def is_worth_it(backend: FlashInferAttention, *sizes: int) -> bool:
        answer = is_worth_sharing(backend, *sizes)
        if answer and off.exists():
            refused.touch()
            return False
        return answer

    patched: Any = FlashInferAttention
    patched.is_worth_sharing = is_worth_it
    run_scheduler_process(config, addresses, ready)


@contextmanager
def sharing_folder() -> Iterator[None]:
    """Engines that start within can be told not to share."""
    with tempfile.TemporaryDirectory(prefix="eb-") as folder:
        os.environ[FOLDER] = folder
        try:
            yield
        finally:
            del os.environ[FOLDER]


@contextmanager
def unshared(device: str) -> Iterator[None]:
    """Steps within read prefixes once per request.

    Raises RuntimeError where no step on a GPU would have shared any.
    """
    off, refused = (Path(os.environ[FOLDER]) / name for name in ("off", "refused"))
    refused.unlink(missing_ok=True)
    off.touch()
    try:
        yield
    finally:
        off.unlink()
    if device == "cuda" and not refused.exists():
        raise RuntimeError("no step would have shared anything")
