"""Typed ends of a ZMQ channel: one message union each, MessagePack on the wire, PUSH connects and PULL binds.

Nothing here blocks at shutdown: a send to a peer that is gone is queued, and dropped when the sender closes.
An end belongs to the thread that made it. A message that does not fit the union is a bug of ours and raises.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Generic, Protocol, TypeVar

import msgspec
import zmq

from ebbtide.srt.managers.wire.message import Message

T = TypeVar("T")
Taken = TypeVar("Taken", contravariant=True)
Given = TypeVar("Given", covariant=True)

# Below this many bytes, handing the buffer over to ZMQ costs more than copying it.
ZERO_COPY_FROM_BYTES = 1 << 16
# Messages that one call returns, before what they ask for is done: one request may bring tens of thousands of
# prompts, and others' tokens are not to wait until all of them are read.
MAX_AT_ONCE: Final = 1024
# Frames that one call takes from ZMQ, to find the messages that overtake: far cheaper than decoding them.
MAX_TAKEN_AT_ONCE: Final = 8 * MAX_AT_ONCE


@dataclass(frozen=True)
class ChannelAddresses:
    """Where the processes of one replica listen, as ZMQ addresses (`ipc://...`, `tcp://...`).

    Attributes:
        scheduler: the replica's leader, the rank with tp_rank 0.
        detokenizer, manager: of all replicas.
        ticks: where each rank hears from its leader, by tp_rank; the leader's own place is unused.
        ranks: where the leader hears from the other ranks.
        rendezvous: where the ranks meet to form their group: `file:///...` or `tcp://host:port`.
    """

    scheduler: str
    detokenizer: str
    manager: str
    ticks: tuple[str, ...] = ()
    ranks: str = ""
    rendezvous: str = ""


class SendEnd(Protocol[Taken]):
    """Where messages of one kind go: a `Sender`, or what stands for one within a process."""

    def send(self, message: Taken) -> None: ...

    def close(self) -> None: ...


class ReceiveEnd(Protocol[Given]):
    """Where a loop that may sleep takes messages of one kind from: a `Receiver`, or what stands for one."""

    def receive(self, timeout_s: float | None) -> Sequence[Given]: ...


class AsyncReceiveEnd(Protocol[Given]):
    """The same for an event loop."""

    async def receive_async(self) -> Sequence[Given]: ...

    def close(self) -> None: ...


class Sender(Generic[T]):
    """The sending end. `send` never blocks; messages wait in memory until the peer takes them."""

    def __init__(self, address: str) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._socket = _socket(zmq.PUSH, address)
        self._socket.connect(address)

    def send(self, message: T) -> None:
        data = self._encoder.encode(message)
        if isinstance(message, Message) and message.overtakes:
            self._socket.send(b"", zmq.SNDMORE)
        self._socket.send(data, 0, len(data) < ZERO_COPY_FROM_BYTES)

    def close(self) -> None:
        self._socket.close()


class Receiver(Generic[T]):
    """The receiving end: any number of senders, one reader.

    Args:
        address: where to listen.
        union: the type, or union of tagged types, of the messages.

    Raises:
        msgspec.ValidationError: while receiving, for an unknown type or a bad field; names the field's path.
    """

    def __init__(self, address: str, union: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(union)
        self._socket = _socket(zmq.PULL, address)
        self._socket.bind(address)
        self._taken: deque[zmq.Frame] = deque()

    def receive(self, timeout_s: float | None = None) -> list[T]:
        """What is queued, up to `MAX_AT_ONCE`, after waiting up to `timeout_s` for the first message.

        0 only looks; None waits for ever. An empty list means that the time passed.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not (messages := self._drain()):
            left_s = None if deadline_s is None else deadline_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                break
            # This rounds up: a remainder below a millisecond must not turn the wait into a busy loop.
            self._socket.poll(None if left_s is None else int(left_s * 1000) + 1)
        return messages

    async def receive_async(self) -> list[T]:
        """As `receive`, without a time. Cancelling it loses nothing."""
        while not (messages := self._drain()):
            with self._readable() as readable:
                await readable.wait()
        return messages

    def close(self) -> None:
        self._socket.close()

    def _drain(self) -> list[T]:
        messages: list[T] = []
        for _ in range(MAX_TAKEN_AT_ONCE):
            try:
                frame = self._socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            if frame.more:
                messages.append(self._decoder.decode(self._socket.recv(copy=False).buffer))
            else:
                self._taken.append(frame)
        while self._taken and len(messages) < MAX_AT_ONCE:
            messages.append(self._decoder.decode(self._taken.popleft().buffer))
        return messages

    @contextmanager
    def _readable(self) -> Iterator[asyncio.Event]:
        # ZMQ signals only what arrives after the queue was found empty, so: drain first, then wait.
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        loop.add_reader(self._socket.fileno(), readable.set)
        try:
            yield readable
        finally:
            loop.remove_reader(self._socket.fileno())


def _socket(kind: int, address: str) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.IPV6, address.startswith("tcp://["))
    return socket
