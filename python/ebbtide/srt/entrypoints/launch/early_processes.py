"""Processes that import what they will need while the configuration is still being read.

Importing torch, and transformers for a tokenizer, is most of an engine's start: the ranks do it beside the
process that starts them, and not after it.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from ebbtide.srt.config import ParallelConfig
from ebbtide.srt.entrypoints.launch.child_process import ChildProcess
from ebbtide.srt.entrypoints.launch.placement import local_ranks
from ebbtide.srt.errors import ConfigurationError
from ebbtide.srt.kernel_cache import kernel_variables
from ebbtide.srt.server_args import ServerArgs

# Modules of the ranks, those of ranks with a tokenizer, and those of ranks on a GPU.
PRELOAD: Final = ("ebbtide.srt.managers.scheduler_process",)
PRELOAD_TOKENIZER: Final = ("transformers.models.auto.tokenization_auto", "xgrammar")
PRELOAD_CUDA: Final = (
    "cuda.bindings.driver",
    "flashinfer",
    "ebbtide.srt.layers.attention.flashinfer_kernels",
    "ebbtide.srt.layers.small_batch.kernels",
    "ebbtide.srt.model_executor.graph_runner",
    "ebbtide.srt.model_executor.sampling.kernel",
)


class EarlyProcesses:
    """The ranks of this node, as far as the arguments alone say. Leaving it ends those that nobody took.

    Arguments that are wrong are refused by who reads the configuration: for them there are no processes here.
    """

    def __init__(self, args: ServerArgs) -> None:
        self._children: dict[str, ChildProcess] = {}
        if args.memory_saver_backend == "torch_memory_saver":
            return  # Their environment hangs on more than the arguments.
        try:
            parallel = ParallelConfig(
                tp_size=args.tp_size, dp_size=args.dp_size, nnodes=args.nnodes, node_rank=args.node_rank
            )
            names = [rank_name(parallel, *rank) for rank in local_ranks(parallel)]
        except (ConfigurationError, TypeError, ZeroDivisionError):
            return
        on_gpu = args.device != "cpu" and Path("/dev/nvidiactl").exists()
        preload: tuple[str, ...] = PRELOAD
        preload += () if args.skip_tokenizer_init else PRELOAD_TOKENIZER
        preload += PRELOAD_CUDA if on_gpu else ()
        # FlashInfer looks where its kernels are as it is imported.
        kernels = kernel_variables(args.kernel_cache_dir)
        for name in names:
            self._children[name] = ChildProcess(name, thread_defaults(parallel), kernels, preload)

    @property
    def pids(self) -> dict[str, int]:
        return {name: child.pid for name, child in self._children.items()}

    def take(self, name: str) -> ChildProcess | None:
        """The process of this name, for its new owner; None if there is none."""
        return self._children.pop(name, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in self._children.values():
            child.kill()
        for child in self._children.values():
            child.close()
        self._children = {}


def rank_name(parallel: ParallelConfig, dp_rank: int, tp_rank: int) -> str:
    """What the process of a rank is called: "scheduler" where it is the only one."""
    if parallel.num_ranks == 1:
        return "scheduler"
    return f"scheduler-tp{tp_rank}" if parallel.dp_size == 1 else f"scheduler-dp{dp_rank}-tp{tp_rank}"


def thread_defaults(parallel: ParallelConfig) -> dict[str, str]:
    """The cores in equal parts, where several ranks would each take all of them."""
    num_ranks = parallel.ranks_per_node
    if num_ranks == 1:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // num_ranks))}
