"""Decides on which node each rank is, and where the processes of all nodes listen.

Channels within one node are Unix sockets in that node's private folder. Channels between nodes are TCP ports
of the listening node's address. The folders of killed engines are removed at the next start.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from ebbtide.srt.config import ParallelConfig
from ebbtide.srt.errors import ConfigurationError
from ebbtide.srt.managers.wire.channel import ChannelAddresses

# The kernel's limit of a Unix socket's path.
MAX_SOCKET_PATH_BYTES = 107
logger = logging.getLogger(__name__)
PREFIX: Final = "ebbtide-"
# The owner locks this file. The kernel releases the lock when the process ends, even if it is killed.
OWNED: Final = "owned"


@dataclass(frozen=True, slots=True)
class NodeAddress:
    """A node's address for the other nodes, its folder for sockets, and its free ports."""

    host: str
    folder: str
    ports: tuple[int, ...]


class _Place(NamedTuple):
    """A listening socket: its name, its node, and the nodes that use it."""

    name: str
    node: int
    users: frozenset[int]

    @property
    def is_shared(self) -> bool:
        return self.users != {self.node}


def node_of(parallel: ParallelConfig, dp_rank: int, tp_rank: int) -> int:
    return (dp_rank * parallel.tp_size + tp_rank) // parallel.ranks_per_node


def local_ranks(parallel: ParallelConfig) -> list[tuple[int, int]]:
    """(dp_rank, tp_rank) of the ranks on this node, in the order of their devices."""
    first = parallel.node_rank * parallel.ranks_per_node
    return [divmod(rank, parallel.tp_size) for rank in range(first, first + parallel.ranks_per_node)]


def num_ports(parallel: ParallelConfig, node: int) -> int:
    places = [*_common_places(parallel)]
    for scheduler, ticks, ranks, rendezvous in _replica_places(parallel):
        places += [scheduler, *ticks, ranks, rendezvous]
    return sum(place.node == node and place.is_shared for place in places)


def place_replicas(parallel: ParallelConfig, nodes: Sequence[NodeAddress]) -> list[ChannelAddresses]:
    """Assign the addresses of each replica's channels, by dp_rank. `nodes`: by node rank."""
    ports = [iter(node.ports) for node in nodes]

    def address(place: _Place, private_scheme: str = "ipc", port: int | None = None) -> str:
        node = nodes[place.node]
        if not place.is_shared:
            return f"{private_scheme}://{_socket_path(node.folder, place.name)}"
        host = f"[{node.host}]" if ":" in node.host else node.host
        return f"tcp://{host}:{port if port is not None else next(ports[place.node])}"

    manager, detokenizer = (address(place) for place in _common_places(parallel))
    return [
        ChannelAddresses(
            scheduler=address(scheduler),
            detokenizer=detokenizer,
            manager=manager,
            ticks=tuple(map(address, ticks)),
            ranks=address(ranks),
            rendezvous=address(rendezvous, "file", parallel.rendezvous_port if dp_rank == 0 else None),
        )
        for dp_rank, (scheduler, ticks, ranks, rendezvous) in enumerate(_replica_places(parallel))
    ]


def bind(host: str, port: int, flags: str = "--host, --port") -> socket.socket:
    """Bind a socket without listening. `port`: 0: a free one. `flags`: of host and port, for errors.

    Raises ConfigurationError: the address is not available.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise cannot_listen(host, port, error, flags) from None
    # A name such as localhost has several addresses; clients expect the one of IPv4.
    family, kind, protocol, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        return listener
    except OSError as error:
        listener.close()
        raise cannot_listen(host, port, error, flags) from None


def cannot_listen(host: str, port: int, error: OSError, flags: str = "--host, --port") -> ConfigurationError:
    return ConfigurationError(f"cannot listen on {host} port {port} ({flags}): {error.strerror or error}")


class ReservedPorts:
    """Free TCP ports of one address, which the kernel gives to nobody else until `close`.

    Each is bound but does not listen, so ZMQ and torch's stores can still bind it by its number.
    """

    def __init__(self, host: str, count: int) -> None:
        self._stack = ExitStack()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        found: list[int] = []
        for _ in range(count):
            holder = self._stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind((host, 0))
            found.append(holder.getsockname()[1])
        self.ports = tuple(found)

    def close(self) -> None:
        self._stack.close()


def _common_places(parallel: ParallelConfig) -> tuple[_Place, _Place]:
    leaders = frozenset(node_of(parallel, dp_rank, 0) for dp_rank in range(parallel.dp_size))
    return _Place("manager", 0, leaders | {0}), _Place("detokenizer", 0, leaders | {0})


def _replica_places(parallel: ParallelConfig) -> Iterator[tuple[_Place, list[_Place], _Place, _Place]]:
    """Yield for each replica: its scheduler, the ticks of each of its ranks, its ranks, its rendezvous."""
    for dp_rank in range(parallel.dp_size):
        suffix = f"-dp{dp_rank}" if parallel.dp_size > 1 else ""
        nodes = [node_of(parallel, dp_rank, tp_rank) for tp_rank in range(parallel.tp_size)]
        leader = nodes[0]
        ticks = [
            _Place(f"ticks{suffix}-tp{tp_rank}", node, frozenset({leader, node}))
            for tp_rank, node in enumerate(nodes)
        ]
        ranks, rendezvous = (
            _Place(f"{name}{suffix}", leader, frozenset(nodes)) for name in ("ranks", "rendezvous")
        )
        yield _Place(f"scheduler{suffix}", leader, frozenset({leader, 0})), ticks, ranks, rendezvous


def _socket_path(folder: str, name: str) -> str:
    path = os.path.join(folder, name)
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise ConfigurationError(
            f"TMPDIR is too long for sockets: {folder} leaves no room within {MAX_SOCKET_PATH_BYTES} bytes"
        )
    return path


class SocketFolder:
    """This process's folder for sockets, in the temporary folder, from `make` to `remove`.

    A fork that outlives the owner holds the lock too; the folder is then removed at the next start after its
    end. Raises ConfigurationError: there is no temporary folder.
    """

    def __init__(self) -> None:
        try:
            parent = tempfile.gettempdir()
        except FileNotFoundError as error:
            raise ConfigurationError(f"{error.strerror}: name one that can be written to by TMPDIR") from None
        # Choose the name before making it, so that `remove` works whenever a signal interrupts `make`.
        self.path = os.path.join(parent, f"{PREFIX}{secrets.token_hex(6)}")
        self._lock = -1

    def make(self) -> None:
        """Make the folder, and remove the folders of killed engines."""
        _sweep(Path(self.path).parent)
        os.mkdir(self.path, 0o700)
        unnamed = f"{self.path}/new"
        self._lock = os.open(unnamed, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # Renamed only when locked, so that another engine's start does not remove the folder before.
        os.rename(unnamed, f"{self.path}/{OWNED}")

    def remove(self) -> None:
        """Remove the folder with its contents. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            lock, self._lock = self._lock, -1
            os.close(lock)


def _sweep(parent: Path) -> None:
    for owned in parent.glob(f"{PREFIX}*/{OWNED}"):
        # Errors: it is another user's, its owner lives, or it has just been removed.
        with suppress(OSError), owned.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(owned.parent, ignore_errors=True)
            logger.info("removed %s, which a killed engine had left", owned.parent)
