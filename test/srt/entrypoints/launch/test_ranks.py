"""Processes of engines with many ranks, on one host and on several nodes: scripts in the place of ranks."""

import os
import queue
import re
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fixtures.servers import environment_of, free_port, is_alive, wait_until

from ebbtide.srt.config import EngineConfig, ParallelConfig
from ebbtide.srt.entrypoints.launch.launcher import NodeProcesses
from ebbtide.srt.entrypoints.launch.node_link import meet
from ebbtide.srt.entrypoints.launch.placement import NodeAddress, place_replicas
from ebbtide.srt.entrypoints.service import EngineService
from ebbtide.srt.errors import ConfigurationError, EngineError
from ebbtide.srt.managers.wire.channel import Receiver
from ebbtide.srt.server_args import ServerArgs
from ebbtide.testing.null_runner import null_config


def config_of(**arguments: Any) -> EngineConfig:
    return null_config(ServerArgs("null", log_level="critical", device="cpu", **arguments))


def target(function: str) -> dict[str, str]:
    return {"scheduler": f"fixtures.scripted_processes:{function}"}


@contextmanager
def running(processes: NodeProcesses) -> Iterator[NodeProcesses]:
    try:
        yield processes
    finally:
        processes.shutdown()


# ------------------------------------------------------------------------------------------------- placement


def test_on_one_host_everything_is_in_the_private_folder() -> None:
    replicas = place_replicas(ParallelConfig(tp_size=2, dp_size=2), [NodeAddress("", "/run/eb", ())])
    places = [place for one in replicas for place in (one.scheduler, *one.ticks, one.ranks, one.rendezvous)]
    assert len(set(places)) == 10
    assert all(address.startswith(("ipc:///run/eb/", "file:///run/eb/")) for address in places)
    assert replicas[0].manager == replicas[1].manager == "ipc:///run/eb/manager"


def test_the_port_where_ranks_meet_can_be_chosen() -> None:
    parallel = ParallelConfig(tp_size=2, nnodes=2, rendezvous_port=29500)
    nodes = [
        NodeAddress("10.0.0.1", "/a", tuple(range(1, 9))),
        NodeAddress("10.0.0.2", "/b", tuple(range(1, 9))),
    ]
    [replica] = place_replicas(parallel, nodes)
    assert replica.rendezvous == "tcp://10.0.0.1:29500"


# ------------------------------------------------------------------------------------------------ on one host


def test_there_is_a_process_for_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8))
    processes = NodeProcesses(config_of(tp_size=2, dp_size=2), target("report_rank"))
    with running(processes):
        # Of two replicas, a request may come to the smaller.
        assert processes.wait_ready() == {"max_total_num_tokens": 63}
        pids = processes.pids
        assert list(pids) == [f"scheduler-dp{dp}-tp{tp}" for dp in (0, 1) for tp in (0, 1)]
        names = [Path(f"/proc/{pid}/comm").read_text().strip() for pid in pids.values()]
        assert names == ["ebb-dp0-tp0", "ebb-dp0-tp1", "ebb-dp1-tp0", "ebb-dp1-tp1"]
        assert {environment_of(pid)["OMP_NUM_THREADS"] for pid in pids.values()} == {"2"}
        assert len(processes.replicas) == 2
    assert not any(is_alive(pid) for pid in pids.values())


def test_not_the_rank_that_fails_for_another_is_named() -> None:
    deaths: queue.SimpleQueue[str] = queue.SimpleQueue()
    with running(NodeProcesses(config_of(tp_size=2), target("fail_after_the_others"))) as processes:
        processes.wait_ready()
        os.kill(processes.pids["scheduler-tp1"], signal.SIGKILL)
        wait_until(lambda: not is_alive(processes.pids["scheduler-tp0"]), "rank 0 has failed, too")
        processes.watch(deaths.put)
        assert deaths.get().startswith("the scheduler-tp1 process was ended by SIGKILL")


def test_a_start_of_which_one_rank_is_stopped_fails_and_leaves_none() -> None:
    processes = NodeProcesses(config_of(tp_size=2, watchdog_timeout=1, dist_timeout=1), target("report_rank"))
    pids = processes.pids
    os.kill(pids["scheduler-tp1"], signal.SIGSTOP)
    with pytest.raises(
        EngineError, match=r"start failed: the scheduler-tp1 .* not answered .*: it is stopped"
    ):
        processes.wait_ready()
    assert not any(is_alive(pid) for pid in pids.values())


@pytest.mark.parametrize("function", ["report_rank", "give_up_on_a_stopped_rank"])
def test_a_rank_that_is_stopped_ends_the_engine_and_not_the_one_that_waits_for_it_is_named(
    function: str,
) -> None:
    deaths: queue.SimpleQueue[str] = queue.SimpleQueue()
    with running(NodeProcesses(config_of(tp_size=2, watchdog_timeout=2), target(function))) as processes:
        processes.wait_ready()
        pids = processes.pids
        # Ahead of the watch: however busy the machine is, the other is not silent for longer.
        os.kill(pids["scheduler-tp1"], signal.SIGSTOP)
        processes.watch(deaths.put)
        said = (
            r"the scheduler-tp1 process has not answered for [\d.]+ s \(--watchdog-timeout 2\): it is stopped"
        )
        assert re.match(said, deaths.get())
        wait_until(lambda: not any(is_alive(pid) for pid in pids.values()), "all have gone")


def test_a_start_that_one_rank_refuses_leaves_none() -> None:
    with pytest.raises(ConfigurationError, match=r"^rank 1 has too little memory$"):
        NodeProcesses(config_of(tp_size=2), target("refuse_on_rank_1")).wait_ready()


# ------------------------------------------------------------------------------------------- on several nodes


class Nodes:
    """The nodes of one engine, each with a launcher of its own in a thread."""

    def __init__(self, function: str, **arguments: Any) -> None:
        # A test that fails must not wait for nodes that do not come.
        arguments = {"dist_timeout": 60, **arguments}
        self.config = config_of(dist_init_addr=f"127.0.0.1:{free_port()}", **arguments)
        self._function = function
        self._pool = ThreadPoolExecutor(8)
        self._stack = ExitStack()
        self.processes: dict[int, NodeProcesses] = {}
        self.ends: dict[int, queue.SimpleQueue[str]] = {}

    def start(self, node_rank: int, **changes: Any) -> Any:
        """Begin to start a node; the future has what its `wait_ready` returns."""
        parallel = replace(self.config.parallel, node_rank=node_rank, **changes)
        runtime = replace(self.config.runtime, random_seed=node_rank + 5)
        config = replace(self.config, parallel=parallel, runtime=runtime)
        return self._pool.submit(self._run, config)

    def _run(self, config: EngineConfig) -> dict[str, Any]:
        rank = config.parallel.node_rank
        processes = NodeProcesses(config, target(self._function))
        self._stack.callback(processes.shutdown)
        facts = processes.wait_ready()
        ends = self.ends[rank] = queue.SimpleQueue()
        processes.watch(ends.put, lambda: ends.put("stopped"))
        self.processes[rank] = processes
        return facts

    def start_all(self) -> dict[str, Any]:
        # Node 0 comes last.
        futures = [self.start(rank) for rank in reversed(range(self.config.parallel.nnodes))]
        facts: dict[str, Any] = futures[-1].result()
        for future in futures:
            future.result()
        return facts

    @property
    def pids(self) -> dict[str, int]:
        return {name: pid for node in self.processes.values() for name, pid in node.pids.items()}

    def close(self) -> None:
        self._stack.close()
        self._pool.shutdown()


@pytest.fixture
def nodes() -> Iterator[Callable[..., Nodes]]:
    with ExitStack() as stack:

        def start(function: str, **arguments: Any) -> Nodes:
            made = Nodes(function, **arguments)
            stack.callback(made.close)
            return made

        yield start


def test_ranks_of_two_nodes_hear_each_other(nodes: Callable[..., Nodes]) -> None:
    both = nodes("converse", tp_size=2, dp_size=3, nnodes=2)
    facts = both.start_all()
    # That of node 0, for all.
    assert facts == {"seed": 5}
    assert [set(both.processes[rank].pids) for rank in (0, 1)] == [
        {"scheduler-dp0-tp0", "scheduler-dp0-tp1", "scheduler-dp1-tp0"},
        {"scheduler-dp1-tp1", "scheduler-dp2-tp0", "scheduler-dp2-tp1"},
    ]
    manager: Receiver[str] = Receiver(both.processes[0].replicas[0].manager, str)
    heard: set[str] = set()
    while len(heard) < 3:
        heard |= set(manager.receive(30))
    manager.close()
    assert heard == {"replica 0", "replica 1", "replica 2"}


def test_a_rank_that_dies_ends_every_node(nodes: Callable[..., Nodes]) -> None:
    victim = 1
    all_nodes = nodes("report_rank", tp_size=3, nnodes=3)
    all_nodes.start_all()
    pids = all_nodes.pids
    os.kill(pids[f"scheduler-tp{victim}"], signal.SIGKILL)
    said = f"the scheduler-tp{victim} process was ended by SIGKILL"
    for rank in range(3):
        expected = said if rank == victim else f"node {victim}: {said}"
        assert all_nodes.ends[rank].get().startswith(expected)
    wait_until(lambda: not any(is_alive(pid) for pid in pids.values()), "all have gone")


@pytest.mark.parametrize(("stopped", "said"), [(0, "stopped"), (1, "node 1 was stopped")])
def test_a_stop_of_one_node_is_the_end_of_the_other(
    nodes: Callable[..., Nodes], stopped: int, said: str
) -> None:
    both = nodes("report_rank", tp_size=2, nnodes=2)
    both.start_all()
    both.processes[stopped].shutdown()
    assert both.ends[1 - stopped].get() == said


def test_a_node_that_is_lost_without_a_word_is_the_end_of_the_engine(
    nodes: Callable[..., Nodes], tmp_path: Path
) -> None:
    both = nodes("report_rank", tp_size=2, nnodes=2)
    first = both.start(0)
    parallel = replace(both.config.parallel, node_rank=1)
    links, *_ = meet(replace(both.config, parallel=parallel), str(tmp_path))
    links.send_ready([])
    first.result()
    links.close()
    assert both.ends[0].get() == "node 1 has gone: its connection ended"


def test_a_start_that_fails_on_one_node_fails_on_all_with_its_reason(nodes: Callable[..., Nodes]) -> None:
    both = nodes("refuse_on_rank_1", tp_size=2, nnodes=2)
    first, second = both.start(0), both.start(1)
    with pytest.raises(ConfigurationError, match=r"^rank 1 has too little memory$"):
        second.result()
    with pytest.raises(ConfigurationError, match=r"^node 1: rank 1 has too little memory$"):
        first.result()


def test_nodes_that_do_not_come_are_named(nodes: Callable[..., Nodes]) -> None:
    three = nodes("report_rank", tp_size=3, nnodes=3)
    last = three.start(2)  # it tries until there is a node 0
    first = three.start(0, dist_timeout_s=2.0)
    with pytest.raises(
        ConfigurationError, match=r"nnodes: node 1 has not come to 127\.0\.0\.1 .* within 2 s"
    ):
        first.result()
    with pytest.raises(EngineError, match="node 0 has gone before all nodes had come"):
        last.result()


def test_a_node_waits_for_node_0_only_so_long(nodes: Callable[..., Nodes]) -> None:
    both = nodes("report_rank", tp_size=2, nnodes=2)
    with pytest.raises(ConfigurationError, match="dist_init_addr: node 0 was not reached at 127"):
        both.start(1, dist_timeout_s=0.5).result()


def test_a_node_that_was_started_otherwise_is_refused_and_may_come_again(nodes: Callable[..., Nodes]) -> None:
    both = nodes("report_rank", tp_size=2, nnodes=2)
    first = both.start(0)
    different = r"alike: page_size is 8 here and 16 on node 0"
    cache, both.config = (
        both.config.cache,
        replace(both.config, cache=replace(both.config.cache, page_size=8)),
    )
    with pytest.raises(ConfigurationError, match=different):
        both.start(1).result()
    both.config = replace(both.config, cache=cache)
    assert both.start(1).result() == {}
    assert first.result() == {"max_total_num_tokens": 64}
    with pytest.raises(ConfigurationError, match="dist_init_addr: node 0 was not reached"):
        # All are there: nobody else is let in.
        both.start(1, dist_timeout_s=0.5).result()


def test_strangers_at_the_port_of_node_0_are_turned_away(nodes: Callable[..., Nodes]) -> None:
    both = nodes("report_rank", tp_size=2, nnodes=2)
    first = both.start(0)
    address = both.config.parallel.dist_init_addr
    assert address is not None
    host, port = address.split(":")

    def call(data: bytes) -> bytes:
        with socket.create_connection((host, int(port)), timeout=30) as stranger:
            stranger.sendall(data)
            with suppress(ConnectionResetError):
                return stranger.recv(1)
        return b""

    wait_until(lambda: is_listening(host, int(port)), "node 0 listens")
    assert call(b"GET / HTTP/1.1\r\n\r\n") == b""
    assert call((5).to_bytes(4) + b"\x80\x04N.!") == b""
    both.start(1).result()
    first.result()


def is_listening(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True


def test_node_0_says_where_it_cannot_listen(nodes: Callable[..., Nodes]) -> None:
    elsewhere = nodes("report_rank", tp_size=2, nnodes=2)
    with pytest.raises(
        ConfigurationError, match=r"cannot listen on 192\.0\.2\.1 port 5 \(--dist-init-addr\)"
    ):
        elsewhere.start(0, dist_init_addr="192.0.2.1:5").result()


def test_requests_come_to_node_0() -> None:
    config = config_of(tp_size=2, nnodes=2, node_rank=1, dist_init_addr="127.0.0.1:5")
    with pytest.raises(ConfigurationError, match="node_rank=1: only node 0 takes requests"):
        EngineService(config)
