"""Starts, watches and ends the processes of an engine on this node, together with the other nodes."""

from __future__ import annotations

import logging
import math
import multiprocessing.connection
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ebbtide.srt.config import EngineConfig, resolve
from ebbtide.srt.entrypoints.launch.child_process import (
    ChildProcess,
    EarlyProcesses,
    PulseWatch,
    rank_name,
    thread_defaults,
)
from ebbtide.srt.entrypoints.launch.console import (
    StageLine,
    Stopped,
    configure_logging,
    ignore_stops,
    raising_signals,
)
from ebbtide.srt.entrypoints.launch.node_link import Ended, NodeLinks, meet
from ebbtide.srt.entrypoints.launch.placement import SocketFolder, local_ranks
from ebbtide.srt.entrypoints.launch.process import ProcessStart
from ebbtide.srt.errors import ConfigurationError, EbbtideError, EngineError
from ebbtide.srt.server_args import ServerArgs

# Named by strings, so that this process does not import the modules that only the others need.
SCHEDULER = {"scheduler": "ebbtide.srt.managers.scheduler_process:run_scheduler_process"}
DETOKENIZER = {"detokenizer": "ebbtide.srt.managers.detokenizer_manager:run_detokenizer_process"}

# How the backend torch_memory_saver intercepts allocations: "torch" (default), by torch's allocator within
# regions; "preload", by a library that is loaded before CUDA's own.
TMS_HOOK_MODE = "EBBTIDE_TMS_HOOK_MODE"
# After a failure, wait this long for an earlier one: a killed rank makes the others fail in their
# collectives, and its own end may be noticed after theirs.
CAUSE_TIMEOUT_S = 1.0
# How long a process may take to write its stacks before the next one is asked.
DUMP_S = 0.2
logger = logging.getLogger(__name__)


class NodeProcesses:
    """The processes of one engine on this node: its ranks, and on node 0 the detokenizer.

    The constructor waits for the other nodes, if there are any. Raises as `meet`.

    Args:
        targets: name → `module:function`, see `ProcessStart`; "scheduler" is one process per rank.
            None: the usual ones.
        early: processes that have been started already.

    Attributes:
        replicas: the addresses of each replica's processes, by dp_rank.
    """

    def __init__(
        self,
        config: EngineConfig,
        targets: Mapping[str, str] | None = None,
        early: EarlyProcesses | None = None,
    ) -> None:
        if targets is None:
            targets = SCHEDULER if config.server_args.skip_tokenizer_init else SCHEDULER | DETOKENIZER
        self._owner_pid = os.getpid()
        self._lock = threading.Lock()
        self._num_ranks = config.parallel.num_ranks
        self._hang_limit = config.server_args.watchdog_timeout, "--watchdog-timeout"
        # At the start the limit is longer, since processes give signs of life only after their imports.
        self._start_limit = max((config.parallel.dist_timeout_s, "--dist-timeout"), self._hang_limit)
        self._is_main_node = config.parallel.node_rank == 0
        self._children: list[ChildProcess] = []
        self._watcher: threading.Thread | None = None
        self._stop_reader, self._stop_writer = multiprocessing.Pipe(duplex=False)
        self._links = NodeLinks.none()
        self._folder = SocketFolder()
        try:
            self._folder.make()
            self._links, self.replicas, random_seed = meet(config, self._folder.path)
            config = replace(config, runtime=replace(config.runtime, random_seed=random_seed))
            for start in self._starts(config, targets):
                child = early.take(start.name) if early is not None else None
                if child is None:
                    child = _spawn(start)
                self._children.append(child)
                child.begin(start)
        except BaseException as error:
            self._end_others(error)
            self.shutdown()
            raise

    @property
    def pids(self) -> dict[str, int]:
        return {child.name: child.pid for child in self._children}

    def wait_ready(self) -> dict[str, Any]:
        """Wait until all processes are ready. Returns the facts they report, e.g. `max_total_num_tokens`.

        If replicas report different numbers, the smallest is returned, since any replica may get a request.
        If a process fails, all are ended.
        """
        try:
            with StageLine() as stages:
                stages.show("", "starting the processes")
                facts = self._gather_facts(stages)
            if not self._is_main_node:
                self._links.send_ready(facts)
        except BaseException as error:
            self._end_others(error)
            self.shutdown()
            raise
        return _merge(facts)

    def watch(self, on_death: Callable[[str], None], on_stop: Callable[[], None] = lambda: None) -> None:
        """Watch the processes in a thread. If one ends by itself or hangs, call `on_death` with the reason.

        The other processes, which may wait for it, are killed first. `on_stop` is called instead if node 0
        was stopped.
        """
        self._watcher = threading.Thread(
            target=self._watch, args=(on_death, on_stop), name="engine-watch", daemon=True
        )
        self._watcher.start()

    def shutdown(self) -> None:
        """End the processes, wait for their ends, and remove the sockets. Idempotent, from any thread."""
        # A fork of the owner has inherited this object, but does not own the processes.
        if os.getpid() != self._owner_pid:
            return
        with self._lock:
            self._stop_writer.close()
            if self._watcher is not None and self._watcher is not threading.current_thread():
                self._watcher.join()
            self._links.send_end()
            self._links.close()
            for child in self._children:
                child.kill()
            while self._children:
                # Remove it before it is closed, so that none is closed twice after an interruption.
                self._children.pop().close()
            self._folder.remove()

    # ---------------------------------------------------------------------------------------------- the start

    def _starts(self, config: EngineConfig, targets: Mapping[str, str]) -> Iterator[ProcessStart]:
        for name, target in targets.items():
            if name not in SCHEDULER:
                if self._is_main_node:
                    yield ProcessStart(name, target, config, self.replicas[0], self._folder.path)
                continue
            for index, (dp_rank, tp_rank) in enumerate(local_ranks(config.parallel)):
                mine = _config_of_rank(config, index, dp_rank, tp_rank)
                yield ProcessStart(
                    rank_name(config.parallel, dp_rank, tp_rank),
                    target,
                    mine,
                    self.replicas[dp_rank],
                    self._folder.path,
                )

    def _gather_facts(self, stages: StageLine) -> list[dict[str, Any]]:
        """Wait for the facts of this node's leading ranks, and on node 0 for those of all nodes.

        A rank with a configuration error, or a killed one, is the cause if others fail too. Since it may be
        noticed after them, other failures are only raised after `CAUSE_TIMEOUT_S`.
        """
        facts: list[dict[str, Any]] = []
        starting: dict[Any, ChildProcess] = {child.pipe: child for child in self._children}
        links = self._links.connections
        unready = set(links) if self._is_main_node else set()
        pulses = PulseWatch(self._children, *self._start_limit)
        failure: EbbtideError | None = None
        deadline_s = math.inf
        # After a failure also wait for other nodes, which may report its cause.
        while starting or unready or (failure is not None and links):
            pulses.look()
            if pulses.lost is not None:
                raise EngineError(f"the start failed: {pulses.lost}")
            left_s = min(pulses.left_s, max(0.0, deadline_s - time.monotonic()))
            for ready in multiprocessing.connection.wait([*starting, *links], left_s):
                if ready not in starting:
                    assert isinstance(ready, multiprocessing.connection.Connection)
                    message = self._links.receive(ready)
                    if isinstance(message, Ended):
                        self._links.pass_on(message)
                        raise _error_of(message)
                    facts.extend(message.facts)
                    unready.discard(ready)
                    continue
                child = starting[ready]
                try:
                    report = child.receive_report(stages)
                except EbbtideError as error:
                    del starting[ready]
                    is_cause = isinstance(error, ConfigurationError) or child.was_ended_by_signal
                    if self._num_ranks == 1 or is_cause:
                        raise error from None
                    failure = failure or error
                    deadline_s = min(deadline_s, time.monotonic() + CAUSE_TIMEOUT_S)
                    continue
                if report is not None:
                    del starting[ready]
                    facts.append(report)
            if failure is not None and time.monotonic() >= deadline_s:
                raise failure
        if failure is not None:
            raise failure
        return facts

    def _end_others(self, error: BaseException) -> None:
        """Tell the other nodes why this one does not start. After a signal, `shutdown` tells them."""
        if isinstance(error, EbbtideError):
            self._links.send_end(str(error), isinstance(error, ConfigurationError))

    # ------------------------------------------------------------------------------------------------ the end

    def _watch(self, on_death: Callable[[str], None], on_stop: Callable[[], None]) -> None:
        pulses = PulseWatch(self._children, *self._hang_limit)
        end = self._first_end(pulses)
        if end is None:
            return
        if pulses.lost is not None or any(child.was_hung for child in self._children):
            # Ranks wait for each other, so any of them may be the cause.
            for child in self._children:
                child.dump_stacks()
                time.sleep(DUMP_S)
        for child in self._children:
            child.kill()
        if end.reason:
            on_death(end.reason)
        else:
            on_stop()

    def _first_end(self, pulses: PulseWatch) -> Ended | None:
        """Wait for the end of a process or a node, and tell the other nodes; None: `shutdown` was called."""
        links = self._links
        running: dict[Any, ChildProcess] = {child.sentinel: child for child in self._children}
        failed: list[ChildProcess] = []
        deadline_s = math.inf
        while True:
            left_s = min(pulses.left_s, max(0.0, deadline_s - time.monotonic()))
            # `_stop_reader` becomes readable when `shutdown` closes the other end of its pipe.
            happened = multiprocessing.connection.wait(
                [*running, *links.connections, self._stop_reader], left_s
            )
            if self._stop_reader in happened:
                return None
            failed += [running.pop(one) for one in happened if one in running]
            is_killed = any(child.was_ended_by_signal for child in failed)
            if not is_killed:
                for connection in links.connections:
                    if connection in happened and isinstance(message := links.receive(connection), Ended):
                        links.pass_on(message)
                        return message
            if failed and deadline_s == math.inf:
                deadline_s = time.monotonic() + (CAUSE_TIMEOUT_S if self._num_ranks > 1 else 0.0)
            pulses.look()
            if pulses.lost is not None or is_killed or time.monotonic() >= deadline_s:
                reason = pulses.lost or _cause(failed, pulses)
                links.send_end(reason)
                return Ended(reason)


def _config_of_rank(config: EngineConfig, index: int, dp_rank: int, tp_rank: int) -> EngineConfig:
    parallel, runtime = config.parallel, config.runtime
    if parallel.num_ranks == 1:
        return config
    if runtime.device.startswith("cuda"):
        device = f"cuda:{parallel.base_gpu_id + index * parallel.gpu_id_step}"
        runtime = replace(runtime, device=device)
    return replace(config, parallel=replace(parallel, dp_rank=dp_rank, tp_rank=tp_rank), runtime=runtime)


def _spawn(start: ProcessStart) -> ChildProcess:
    is_rank = start.name.startswith("scheduler")
    return ChildProcess(
        start.name,
        thread_defaults(start.config.parallel) if is_rank else {},
        _library_environment(start.config) if is_rank else {},
    )


def _library_environment(config: EngineConfig) -> dict[str, str]:
    """The environment variables that only ranks need."""
    mode = os.environ.get(TMS_HOOK_MODE, "torch")
    if mode not in ("torch", "preload"):
        raise ConfigurationError(f"{TMS_HOOK_MODE}: expected torch or preload, got {mode!r}")
    if mode == "torch" or config.server_args.memory_saver_backend != "torch_memory_saver":
        return {}
    # Imported here, since it imports torch, which this process may not need.
    from ebbtide.srt.memory_saver.saver import preload_environment

    return preload_environment()


def _merge(facts: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the facts of several replicas: the smallest of numbers; all else is equal."""
    merged: dict[str, Any] = {}
    for name, value in ((name, value) for one in facts for name, value in one.items()):
        is_least = name in merged and isinstance(value, int)
        merged[name] = min(merged[name], value) if is_least else value
    return merged


def _cause(failed: Sequence[ChildProcess], pulses: PulseWatch) -> str:
    """The reason why the engine ends: killed or stopped processes first, since they make others fail."""
    killed = [child for child in failed if child.was_ended_by_signal]
    if not killed and pulses.suspect is not None and any(child.was_hung for child in failed):
        return pulses.suspect
    return (killed or failed)[0].describe_end()


def _error_of(end: Ended) -> EbbtideError:
    if end.is_configuration:
        return ConfigurationError(end.reason)
    return EngineError(end.reason or "node 0 was stopped")


def launch_node(server_args: ServerArgs, early: EarlyProcesses | None = None) -> None:
    """Run this node's ranks until node 0 stops or a signal comes. All have ended when it returns or raises.

    Raises:
        ConfigurationError: the engine cannot start with these arguments, or node 0 cannot be reached.
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
    """Like `launch_node`, for any configuration. `targets`: see `NodeProcesses`; None: the usual ones."""
    ends: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    is_ready = False
    try:
        # Also put it into the queue, since `Stopped` may be lost in a callback of the interpreter.
        with raising_signals(lambda: ends.put(None)):
            processes = NodeProcesses(configure(), targets, early)
            try:
                processes.wait_ready()
                is_ready = True
                logger.info("the ranks of this node are ready")
                processes.watch(ends.put, lambda: ends.put(None))
                death = ends.get()
            finally:
                # This node may be stopped by node 0 and by a signal at once.
                ignore_stops()
                processes.shutdown()
    except Stopped:
        if not is_ready:
            raise
        return
    if death is not None:
        raise EngineError(death)
