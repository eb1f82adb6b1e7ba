"""Connections between the launchers of an engine's nodes, over which they start and end together.

Node 0 listens at `dist_init_addr`. Each other node connects and sends its addresses. When all have come, node
0 sends the addresses of all processes to each. The connections stay open: over them each node reports that
it is ready, and that it ends. If a node disappears, its connection ends, at the latest when the kernel gets
no more answers to its keepalive probes.

Messages are msgspec structs; nothing is unpickled. But whoever reaches the port can pose as a node: like
those of the ranks, these connections belong in a private network.
"""

from __future__ import annotations

import dataclasses
import logging
import multiprocessing.connection
import socket
import struct
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

import msgspec

from ebbtide.srt.argument_checks import split_address
from ebbtide.srt.config import EngineConfig
from ebbtide.srt.entrypoints.launch.placement import (
    NodeAddress,
    ReservedPorts,
    bind,
    cannot_listen,
    num_ports,
    place_replicas,
)
from ebbtide.srt.errors import ConfigurationError, EngineError
from ebbtide.srt.managers.wire.channel import ChannelAddresses
from ebbtide.version import __version__

logger = logging.getLogger(__name__)

# How long to wait for the rest of a message, while other nodes wait too.
MESSAGE_TIMEOUT_S = 5
MAX_MESSAGE_BYTES = 1 << 22
RETRY_S = 0.2
# The kernel probes a silent peer every second, and ends the connection after this many lost probes.
PROBES = 4


class Hello(msgspec.Struct, tag=True, frozen=True):
    """A node's first message: its address, and by name the values that must be equal on all nodes."""

    node_rank: int
    node: NodeAddress
    agreement: dict[str, str]


class Welcome(msgspec.Struct, tag=True, frozen=True):
    """All nodes have come. `replicas`: the addresses of each replica, by dp_rank."""

    replicas: list[ChannelAddresses]
    random_seed: int


class Refused(msgspec.Struct, tag=True, frozen=True):
    """This node cannot be part of the engine."""

    message: str


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The ranks of a node are ready. `facts`: the reports of its leading ranks."""

    facts: list[dict[str, Any]]


class Ended(msgspec.Struct, tag=True, frozen=True):
    """A node ends, and so must the others.

    `reason`: empty if it was stopped. `is_configuration`: whether the reason is a ConfigurationError.
    """

    reason: str = ""
    is_configuration: bool = False


_hello_decoder = msgspec.msgpack.Decoder(Hello)
_answer_decoder: msgspec.msgpack.Decoder[Welcome | Refused] = msgspec.msgpack.Decoder(Welcome | Refused)
_decoder: msgspec.msgpack.Decoder[Ready | Ended] = msgspec.msgpack.Decoder(Ready | Ended)


class NodeLinks:
    """The connections of this node: node 0 has one to each other node, the others have one to node 0.

    `reserved`: ports to keep until the links are closed.
    """

    def __init__(self, node_rank: int, nodes: Mapping[Connection, int], reserved: ReservedPorts) -> None:
        self._node_rank = node_rank
        self._nodes = dict(nodes)
        self._reserved = reserved
        self._lock = threading.Lock()

    @classmethod
    def none(cls) -> NodeLinks:
        """The links of an engine with one node: none."""
        return cls(0, {}, ReservedPorts("", 0))

    @property
    def connections(self) -> list[Connection]:
        return list(self._nodes)

    def receive(self, connection: Connection) -> Ready | Ended:
        """Receive the next message of a readable connection. A lost connection counts as the node's end."""
        node = self._nodes[connection]
        try:
            message = _decoder.decode(connection.recv_bytes(MAX_MESSAGE_BYTES))
        except (EOFError, OSError, msgspec.DecodeError) as error:
            return Ended(f"node {node} has gone: {_describe(error)}")
        if isinstance(message, Ended) and not message.reason and node != 0:
            return Ended(f"node {node} was stopped")
        return message

    def send_ready(self, facts: list[dict[str, Any]]) -> None:
        self._send(Ready(facts))

    def send_end(self, reason: str = "", is_configuration: bool = False) -> None:
        """Tell the connected nodes that this node ends. `reason`: empty if it was stopped."""
        self._send(Ended(reason and f"node {self._node_rank}: {reason}", is_configuration))

    def pass_on(self, end: Ended) -> None:
        self._send(end)

    def close(self) -> None:
        with self._lock:
            for connection in self._nodes:
                connection.close()
            self._nodes.clear()
            self._reserved.close()

    def _send(self, message: Ready | Ended) -> None:
        data = msgspec.msgpack.encode(message)
        with self._lock:
            for connection in self._nodes:
                with suppress(OSError):  # the node has gone, which `receive` reports
                    connection.send_bytes(data)


# The links, the addresses of each replica by dp_rank, and the random seed of all nodes.
Meeting: TypeAlias = tuple[NodeLinks, list[ChannelAddresses], int]


def meet(config: EngineConfig, folder: str) -> Meeting:
    """Wait until all nodes have come. `folder`: this node's folder for sockets.

    Raises:
        ConfigurationError: node 0's address is not available, nodes are missing when the time is up, or this
            node has other arguments than node 0.
        EngineError: node 0 has gone.
    """
    parallel = config.parallel
    if parallel.nnodes == 1:
        replicas = place_replicas(parallel, [NodeAddress("", folder, ())])
        return NodeLinks.none(), replicas, config.runtime.random_seed
    return _host(config, folder) if parallel.node_rank == 0 else _join(config, folder)


# -------------------------------------------------------------------------------------------------- node 0


def _host(config: EngineConfig, folder: str) -> Meeting:
    parallel = config.parallel
    listener = _listen(parallel.dist_init_addr)
    host = listener.getsockname()[0]
    reserved = ReservedPorts(host, num_ports(parallel, 0))
    guests = _Guests(config)
    try:
        with listener:
            guests.gather(listener, time.monotonic() + parallel.dist_timeout_s)
        nodes = [NodeAddress(host, folder, reserved.ports), *(guests.node(rank) for rank in guests.expected)]
        replicas = place_replicas(parallel, nodes)
        welcome = msgspec.msgpack.encode(Welcome(replicas, config.runtime.random_seed))
        for connection in guests.connections:
            with suppress(OSError):  # the node has gone, which `NodeLinks.receive` reports
                connection.send_bytes(welcome)
    except BaseException:
        guests.close()
        reserved.close()
        raise
    return NodeLinks(0, guests.connections, reserved), replicas, config.runtime.random_seed


class _Guests:
    """The other nodes that have come to node 0."""

    def __init__(self, config: EngineConfig) -> None:
        self._agreement = agreement(config)
        self._timeout_s = config.parallel.dist_timeout_s
        self.expected = range(1, config.parallel.nnodes)
        self.connections: dict[Connection, int] = {}
        self._nodes: dict[int, NodeAddress] = {}

    def node(self, rank: int) -> NodeAddress:
        return self._nodes[rank]

    def gather(self, listener: socket.socket, deadline_s: float) -> None:
        host, port = listener.getsockname()[:2]
        logger.info("waiting for nodes %s at %s port %d", self._missing(), host, port)
        while self._missing():
            left_s = max(0.0, deadline_s - time.monotonic())
            happened = multiprocessing.connection.wait([listener, *self.connections], left_s)
            if not happened:
                missing = ", ".join(map(str, self._missing()))
                raise ConfigurationError(
                    f"nnodes: node {missing} has not come to {host} port {port} within {self._timeout_s:g} s"
                )
            for connection in [one for one in self.connections if one in happened]:
                # Nodes send nothing yet, so it is readable because the node has gone.
                self._forget(connection)
            if listener in happened:
                self._admit(*listener.accept())

    def close(self) -> None:
        for connection in self.connections:
            connection.close()

    def _missing(self) -> list[int]:
        return [rank for rank in self.expected if rank not in self._nodes]

    def _forget(self, connection: Connection) -> None:
        rank = self.connections.pop(connection)
        del self._nodes[rank]
        connection.close()
        logger.warning("node %d has left again: waiting for nodes %s", rank, self._missing())

    def _admit(self, accepted: socket.socket, address: tuple[Any, ...]) -> None:
        peer = address[0]
        connection = _as_connection(accepted)
        try:
            hello = _hello_decoder.decode(connection.recv_bytes(MAX_MESSAGE_BYTES))
        except (EOFError, OSError, msgspec.DecodeError) as error:
            logger.warning("%s is not a node of this engine: %s", peer, _describe(error))
            connection.close()
            return
        if (refusal := self._refusal(hello)) is not None:
            logger.warning("node %d at %s is refused: %s", hello.node_rank, peer, refusal)
            with suppress(OSError):
                connection.send_bytes(msgspec.msgpack.encode(Refused(refusal)))
            connection.close()
            return
        self.connections[connection] = hello.node_rank
        self._nodes[hello.node_rank] = hello.node
        logger.info("node %d has joined from %s", hello.node_rank, peer)

    def _refusal(self, hello: Hello) -> str | None:
        ours, theirs = self._agreement, hello.agreement
        differing = [
            f"{name} is {theirs.get(name)} here and {ours.get(name)} on node 0"
            for name in sorted(ours.keys() | theirs.keys())
            if ours.get(name) != theirs.get(name)
        ]
        if differing:
            return f"the nodes must be started alike: {'; '.join(differing)}"
        if hello.node_rank in self._nodes:
            return f"node_rank: there is a node {hello.node_rank} already"
        return None


def _listen(address: str | None) -> socket.socket:
    assert address is not None, "checked with the arguments"
    host, port = split_address(address)
    listener = bind(host, port, "--dist-init-addr")
    try:
        listener.listen()
    except OSError as error:
        listener.close()
        raise cannot_listen(host, port, error, "--dist-init-addr") from None
    return listener


def agreement(config: EngineConfig) -> dict[str, str]:
    """By name, the values that must be equal on all nodes: those that affect what is computed, and when."""
    model, parallel = config.model, config.parallel
    slices = (config.cache, config.schedule)
    together = {name: value for part in slices for name, value in dataclasses.asdict(part).items()}
    given = (
        "memory_saver_backend",
        "enable_weights_cpu_backup",
        "kv_park_bytes",
        "update_staging",
        "prefix_cache_scope",
    )
    for name in (
        *given,
        "weight_update_timeout_s",
        "custom_weight_loader",
        "refuse_nonfinite",
        "weight_version",
    ):
        together[name] = getattr(config.server_args, name)
    together |= {name: getattr(parallel, name) for name in ("tp_size", "dp_size", "nnodes")}
    shape = ("vocab_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
    for name in ("architecture", "dtype", "context_len", "load_format", *shape):
        together[name] = getattr(model, name)
    together["device"] = config.runtime.device.partition(":")[0]
    together["cuda_graph_bs"] = config.runtime.cuda_graph_bs
    together["attention_backend"] = config.runtime.attention_backend
    return {"ebbtide": __version__} | {name: str(value) for name, value in together.items()}


# -------------------------------------------------------------------------------------------- the other nodes


def _join(config: EngineConfig, folder: str) -> Meeting:
    parallel = config.parallel
    deadline_s = time.monotonic() + parallel.dist_timeout_s
    connected = _connect(parallel.dist_init_addr, parallel.dist_timeout_s, deadline_s)
    # This node's address in the network of node 0.
    host = connected.getsockname()[0]
    connection = _as_connection(connected)
    reserved = ReservedPorts(host, num_ports(parallel, parallel.node_rank))
    try:
        node = NodeAddress(host, folder, reserved.ports)
        hello = Hello(parallel.node_rank, node, agreement(config))
        connection.send_bytes(msgspec.msgpack.encode(hello))
        answer = _receive_answer(connection, deadline_s)
    except BaseException:
        connection.close()
        reserved.close()
        raise
    return NodeLinks(parallel.node_rank, {connection: 0}, reserved), answer.replicas, answer.random_seed


def _connect(address: str | None, timeout_s: float, deadline_s: float) -> socket.socket:
    assert address is not None, "checked with the arguments"
    while True:
        left_s = max(MESSAGE_TIMEOUT_S, deadline_s - time.monotonic())
        try:
            return socket.create_connection(split_address(address), timeout=left_s)
        except OSError as error:
            if time.monotonic() >= deadline_s:
                raise ConfigurationError(
                    f"dist_init_addr: node 0 was not reached at {address} within {timeout_s:g} s: "
                    f"{error.strerror or error}"
                ) from None
        # Node 0 may be started after this one.
        time.sleep(RETRY_S)


def _receive_answer(connection: Connection, deadline_s: float) -> Welcome:
    # Wait a little longer than node 0 does, to receive its reason.
    left_s = max(0.0, deadline_s - time.monotonic()) + MESSAGE_TIMEOUT_S
    try:
        if not connection.poll(left_s):
            raise ConfigurationError("nnodes: node 0 is there, and other nodes have not come in time")
        answer = _answer_decoder.decode(connection.recv_bytes(MAX_MESSAGE_BYTES))
    except (EOFError, OSError, msgspec.DecodeError) as error:
        raise EngineError(f"node 0 has gone before all nodes had come: {_describe(error)}") from None
    if isinstance(answer, Refused):
        raise ConfigurationError(answer.message)
    return answer


# ------------------------------------------------------------------------------------------------- both sides


def _as_connection(connected: socket.socket) -> Connection:
    connected.settimeout(None)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", MESSAGE_TIMEOUT_S, 0))
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, PROBES * 1000)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(connected.detach())


def _describe(error: Exception) -> str:
    return "its connection ended" if isinstance(error, EOFError) else f"{type(error).__name__}: {error}"
