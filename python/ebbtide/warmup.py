"""`ebbtide warmup`: compiles a model's GPU kernels, so that later starts find them in the caches."""

from __future__ import annotations

import dataclasses
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from ebbtide.srt.errors import ConfigurationError, EbbtideError
from ebbtide.srt.server_args import ServeParser, ServerArgs

# Size of the KV pool: enough for the longest prompt that is run.
WARMUP_TOKENS = 65536


def main(argv: Sequence[str]) -> int:
    """Compile a model's kernels and show the progress.

    Returns the exit status: 0: done; 1: it failed; 2: the arguments or the machine do not fit.
    """
    parser = ServeParser(
        prog="ebbtide warmup",
        usage="%(prog)s MODEL [further arguments of `ebbtide serve`]",
        description="Compile every kernel that a model needs on this machine's GPU, with the arguments that "
        "it will be served with. The weights are not read, but there must be room for them. Later starts "
        "find the kernels in the caches.",
    )
    args = parser.read(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    started = time.monotonic()
    try:
        with _shown_progress() as progress:
            is_needed = warm_up(args, progress)
    except EbbtideError as error:
        print(f"ebbtide warmup: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigurationError) else 1
    print(
        f"ready, after {time.monotonic() - started:.0f} s" if is_needed else "nothing is compiled for a CPU"
    )
    return 0


@contextmanager
def _shown_progress() -> Iterator[Callable[[str, int, int], None] | None]:
    """A function that shows progress bars on a terminal; None elsewhere: progress is logged instead."""
    console = Console()
    if not console.is_terminal:
        yield None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as bars:
        tasks: dict[str, TaskID] = {}

        def show(what: str, number: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=number, total=total)

        yield show


def warm_up(args: ServerArgs, progress: Callable[[str, int, int], None] | None = None) -> bool:
    """Build the model with random weights and a small KV pool, and run it; returns False on a CPU.

    Of a model that is split over ranks, only the first rank's part is built: kernels depend on shapes only.

    Args:
        progress: called with what is being compiled, how many are done and how many there are; None: progress
            is logged.

    Raises:
        ConfigurationError: an argument, the model or the machine does not fit.
    """
    # Imported here, since they take seconds, which a usage error should not.
    from ebbtide.srt.config import resolve
    from ebbtide.srt.device import open_device
    from ebbtide.srt.distributed.parallel_group import ParallelGroup
    from ebbtide.srt.kernel_cache import keep_kernels_in
    from ebbtide.srt.memory_saver.saver import open_memory_saver
    from ebbtide.srt.model_executor.builder import build_model_runner

    config = resolve(
        dataclasses.replace(
            args, load_format="dummy", skip_tokenizer_init=True, max_total_tokens=WARMUP_TOKENS
        )
    )
    if config.runtime.device == "cpu":
        return False
    keep_kernels_in(args.kernel_cache_dir)
    device = open_device(config.runtime.device)
    saver = open_memory_saver(config.server_args.memory_saver_backend, device)
    group = ParallelGroup(config.parallel.tp_size)
    build_model_runner(config, device, saver, group, progress, rehearses=True)
    return True
