"""`ebbtide warmup`: compile what a model needs, so that engines start at once from then on."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ebbtide.srt.errors import ConfigurationError, EbbtideError
from ebbtide.srt.server_args import ServerArgs

if TYPE_CHECKING:
    from torch import Tensor

# Enough for the longest prompt that is run.
WARMUP_TOKENS = 65536


def main(argv: Sequence[str]) -> int:
    """Compile, and say what is being done.

    Returns the exit status: 0 done, 1 it failed, 2 the arguments or the machine do not do.
    """
    parser = argparse.ArgumentParser(
        prog="ebbtide warmup",
        usage="%(prog)s --model-path MODEL [further arguments of `ebbtide serve`]",
        description="Compile every kernel that a model needs on this machine's GPU, with the arguments that "
        "it will be served with. The weights are not read, but there must be room for them. Later starts "
        "find the kernels in the caches.",
        allow_abbrev=False,
    )
    ServerArgs.add_cli_args(parser)
    args = ServerArgs.from_cli_args(parser.parse_args(argv))
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    started = time.monotonic()
    try:
        is_needed = warm_up(args)
    except EbbtideError as error:
        print(f"ebbtide warmup: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigurationError) else 1
    print(
        f"ready, after {time.monotonic() - started:.0f} s" if is_needed else "nothing is compiled for a CPU"
    )
    return 0


def warm_up(args: ServerArgs) -> bool:
    """Build the model with random weights and a small KV pool, and run it. False where there is no GPU.

    Of a model that ranks divide the first rank's part is built: kernels are compiled for its shapes.

    Raises:
        ConfigurationError: an argument, the model or the machine does not do.
    """
    from ebbtide.srt.config import resolve  # seconds of imports: not for a usage error
    from ebbtide.srt.device.choose import open_device, open_memory_saver
    from ebbtide.srt.model_executor.builder import build_model_runner

    config = resolve(
        dataclasses.replace(
            args, load_format="dummy", skip_tokenizer_init=True, max_total_tokens=WARMUP_TOKENS
        )
    )
    if config.runtime.device == "cpu":
        return False
    device = open_device(config.runtime.device)
    saver = open_memory_saver(config.memory.backend, device)
    group = FirstRank(config.parallel.tp_size)
    build_model_runner(config.model, config.cache, config.schedule, config.runtime, device, saver, group)
    return True


class FirstRank:
    """The first of so many tensor-parallel ranks, without the others: shapes are right, numbers are not."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def all_reduce_(self, x: Tensor) -> Tensor:
        return x

    def add_reduced_(self, x: Tensor, onto: Tensor) -> None:
        onto += x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        repeats = [1] * x.dim()
        repeats[dim] = self.size
        return x.repeat(*repeats)

    def smallest(self, value: int) -> int:
        return value

    def close(self) -> None:
        """There is nothing to leave."""
