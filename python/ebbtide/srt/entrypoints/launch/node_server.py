"""A node other than node 0: its ranks serve, and nothing listens to clients."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Mapping

from ebbtide.srt.config import EngineConfig, resolve
from ebbtide.srt.entrypoints.launch.early_processes import EarlyProcesses
from ebbtide.srt.entrypoints.launch.launcher import NodeProcesses
from ebbtide.srt.entrypoints.launch.stop_signals import Stopped, raising_signals
from ebbtide.srt.entrypoints.log_format import configure_logging
from ebbtide.srt.errors import EngineError
from ebbtide.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)


def launch_node(server_args: ServerArgs, early: EarlyProcesses | None = None) -> None:
    """Lend this node's ranks until node 0 stops or a signal comes; returns then, with no process left.

    Raises:
        ConfigurationError: the engine cannot start so, or node 0 is not found.
        EngineError: a process, or another node, has ended by itself.
        Stopped: a signal came before the ranks were ready.
    """
    configure_logging(server_args, f"node-{server_args.node_rank}")
    serve_node(lambda: resolve(server_args), early=early)


def serve_node(
    configure: Callable[[], EngineConfig],
    targets: Mapping[str, str] | None = None,
    early: EarlyProcesses | None = None,
) -> None:
    """As `launch_node`, for any configuration; `targets` are the processes, if not the usual ones."""
    ends: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    is_ready = False
    try:
        # The queue hears of it too: what is raised in a callback of the interpreter is lost.
        with raising_signals(lambda: ends.put(None)):
            processes = NodeProcesses(configure(), targets, early)
            try:
                processes.wait_ready()
                is_ready = True
                logger.info("the ranks of this node are ready")
                processes.watch(ends.put, lambda: ends.put(None))
                death = ends.get()
            finally:
                processes.shutdown()
    except Stopped:
        if not is_ready:
            raise
        return
    if death is not None:
        raise EngineError(death)
