"""Updates that come piece by piece, each announced by its sender.

checkpoint-engine (`update_weights_from_ipc`) runs on the same GPU as each rank. It offers one buffer of its
memory, and then says again and again which tensors it has put there. Source: wire_api section 4.5.

prime-rl's trainer broadcasts state dicts: first their number. Then for each: the length of a pickle; the
pickle, which lists names, shapes and sizes by dtype; and one broadcast per dtype, of all its elements.
Source: wire_vllm section 3.2.
"""

from __future__ import annotations

import enum
import math
import threading
from collections.abc import Callable, Generator, Mapping
from typing import Any, Final, Generic, TypeAlias, TypeVar

import torch
import zmq
from torch import Tensor

from ebbtide.formats.allowed_globals import (
    SenderFailure,
    cuda_tensor,
    kind_of,
    record_fields,
    resolve_global,
    resolve_offer,
    tensor_dtype,
    text,
)
from ebbtide.formats.bucket import tensors_in
from ebbtide.formats.pickle_reader import read_pickle
from ebbtide.formats.tensor_refs import CudaStorageRef, TensorHeader, dtype_named, natural, tensor_shape
from ebbtide.formats.weight_group import Broadcasts, TensorKinds, WeightGroup
from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.slices import Slices, finish
from ebbtide.srt.weight_sync.borrowed_memory import BorrowedMemory
from ebbtide.srt.weight_sync.cuda_memory import CudaIpc
from ebbtide.srt.weight_sync.source import WeightSource

Plan = TypeVar("Plan")
MakePlan: TypeAlias = Callable[[WeightSource], Slices[Plan]]

MAX_MESSAGE_BYTES: Final = 64 << 20
# How long the last answer is kept for a sender that has not read it.
LINGER_MS: Final = 2000
# The name of a thread that answers a sender after its update was given up.
ANSWERING: Final = "ipc-answers"
_FIELDS: Final = ("name", "shape", "dtype", "offset")
_DONE: Final = b""
MAX_STATE_DICTS: Final = 1 << 16
MAX_PICKLE_BYTES: Final = 64 << 20
_NUMBER: Final[TensorKinds] = [((1,), torch.int64)]
# Yields what to receive next, and is sent what has arrived; yields a source when a state dict is complete.
_Receiving: TypeAlias = Generator[TensorKinds | WeightSource, list[Tensor], None]


class _Stage(enum.Enum):
    """What the sender's next message is."""

    BUFFER = enum.auto()  # the handle of its buffer
    BUCKETS = enum.auto()  # what it has put into the buffer, or that there is no more
    END = enum.auto()  # its end, after the buffer was given back
    LAST_WORD = enum.auto()  # its last message, after its buffer was refused
    OVER = enum.auto()  # none: everything has come
    FAILED = enum.auto()  # none: the update has failed
    LEFT = enum.auto()  # nobody listens any more


class _Conversation(Generic[Plan]):
    """What both kinds share: each piece is planned, and the first problem is remembered.

    Args:
        plan: makes the plan of a piece.

    Attributes:
        bucket: the piece that has come; None: there is none, or the end has come.
    """

    def __init__(self, plan: MakePlan[Plan]) -> None:
        self._plan = plan
        self.bucket: WeightSource | None = None
        self._owes_answer = False
        self._refused = ""

    def piece(self) -> Slices[Plan | None]:
        return None if self.bucket is None else (yield from self._plan(self.bucket))

    def answer(self, problem: str = "") -> None:
        self._refused = self._refused or problem
        self._owes_answer = False
        self.bucket = None


class IpcConversation(_Conversation[Plan]):
    """Implements `control.weights.Conversation` with checkpoint-engine, over a ZMQ socket.

    Args:
        address: the `ipc://` address of this rank's sender.
    """

    def __init__(self, plan: MakePlan[Plan], address: str, cuda: CudaIpc) -> None:
        super().__init__(plan)
        self._cuda = cuda
        self._memory = BorrowedMemory(cuda)
        self._buffer: torch.Tensor | None = None
        self._stage = _Stage.BUFFER
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        # The monitor reports only disconnects, so nothing about a sender that is not there yet.
        self._ends: zmq.Socket[bytes] = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            _close(self._socket, self._ends)
            raise RequestRejected(
                f"zmq_handles: {address[:200]!r} cannot be connected to: {error}"
            ) from error

    def poll(self) -> bool:
        # Look for the sender's end before reading messages: it may follow right after the last one.
        has_ended = bool(self._ends.poll(0))
        while not self._owes_answer and self._socket.poll(0):
            message = self._socket.recv()
            self._owes_answer = True
            try:
                self._take(message)
            except RequestRejected as error:
                self.answer(error.message)
            if self._stage is _Stage.FAILED:
                raise RequestRejected(f"nothing of the update is served: {self._refused}")
        if has_ended and not self._owes_answer:
            self._refused = self._refused or "the sender has ended"
            raise RequestRejected(f"nothing of the update is served: {self._refused}")
        return self._owes_answer

    def answer(self, problem: str = "") -> None:
        super().answer(problem)
        self._socket.send(problem.encode() or _DONE)

    def close(self) -> None:
        """Give the buffer back. A thread answers a sender in the middle, which would wait for ever else."""
        problem = self._refused or "the update was given up"
        if self._owes_answer:
            self.answer(problem)
        self._close_buffer()
        stage, self._stage = self._stage, _Stage.LEFT
        sockets = self._socket, self._ends
        if stage in (_Stage.BUCKETS, _Stage.END, _Stage.LAST_WORD):
            threading.Thread(
                target=_answer_to_the_end, args=(*sockets, problem), name=ANSWERING, daemon=True
            ).start()
        elif stage is not _Stage.LEFT:
            _close(*sockets)

    def _take(self, message: bytes) -> None:
        """Handle a message, and answer it unless the caller must do that."""
        stage, said = self._stage, None
        if stage is _Stage.BUFFER:
            self._stage = _Stage.LAST_WORD
        if stage is not _Stage.LAST_WORD:
            said = read_pickle(message, resolve_offer)
        match stage, said:
            case _Stage.BUFFER, _:
                self._open(said)
                self._stage = _Stage.BUCKETS
                self.answer()
            case _Stage.BUCKETS, list():
                self.bucket = self._read(said)
            case _Stage.BUCKETS, None:
                self._close_buffer()
                self._stage = _Stage.END
                self.answer()
            case _Stage.END, None if not self._refused:
                self._stage = _Stage.OVER
            case _:
                self._stage = _Stage.FAILED
                self.answer(self._refused or _complaint(said))

    def _open(self, said: object) -> None:
        ref = cuda_tensor(said, self._cuda.index)
        if isinstance(ref.storage, CudaStorageRef):
            self._memory.record(ref.storage)
        if ref.dtype != torch.uint8 or len(ref.shape) != 1 or ref.stride != (1,):
            raise RequestRejected(f"the buffer: expected bytes (1-D uint8), got {ref.dtype} of {ref.shape}")
        self._memory.require(ref.storage)
        finish(self._memory.open())
        buffer = self._memory.tensor(ref)
        assert isinstance(buffer, torch.Tensor), "only device memory can be offered"
        self._buffer = buffer

    def _read(self, listed: list[object]) -> WeightSource:
        buffer = self._buffer
        assert buffer is not None
        places = [_place(item, buffer.numel()) for item in listed]
        headers = [header for header, _ in places]
        return WeightSource(headers, lambda: tensors_in(buffer, places), is_on_device=True)

    def _close_buffer(self) -> None:
        self.bucket = None
        self._buffer = None
        self._memory.close()


def _answer_to_the_end(socket: zmq.Socket[bytes], ends: zmq.Socket[bytes], problem: str) -> None:
    poller = zmq.Poller()
    for each in (socket, ends):
        poller.register(each, zmq.POLLIN)
    while socket in dict(poller.poll()):
        socket.recv()
        socket.send(problem.encode())
    _close(socket, ends)


def _close(socket: zmq.Socket[bytes], ends: zmq.Socket[bytes]) -> None:
    socket.disable_monitor()
    ends.close()
    socket.close()


def open_conversation(
    plan: MakePlan[Plan], zmq_handles: Mapping[str, str], cuda: CudaIpc | None
) -> IpcConversation[Plan]:
    """Connect to this rank's sender. `zmq_handles`: `GPU-<uuid>` of the device → address."""
    for address in zmq_handles.values():
        if not address.startswith("ipc://") or "\0" in address:
            raise RequestRejected(f"zmq_handles: expected addresses as ipc://PATH, got {address[:200]!r}")
    if cuda is None:
        raise RequestRejected(
            "update_weights_from_ipc is for CUDA devices, and this engine runs on the CPU: use "
            "update_weights_from_tensor"
        )
    addresses = {device.lower().removeprefix("gpu-"): address for device, address in zmq_handles.items()}
    own = cuda.uuid.lower()
    if own not in addresses:
        known = ", ".join(sorted(zmq_handles))[:1000] or "none"
        raise RequestRejected(f"zmq_handles: there is no address for GPU-{cuda.uuid}; given: {known}")
    return IpcConversation(plan, addresses[own], cuda)


def _complaint(said: object) -> str:
    if isinstance(said, SenderFailure):
        return f"the sender gave up: {said.message}"
    return f"the sender said {kind_of(said)}, which was not expected"


def _place(item: object, num_bytes: int) -> tuple[TensorHeader, int]:
    """A tensor's header, and where it begins in the buffer, in bytes."""
    fields: dict[str, Any] = record_fields(item, "a tensor of the buffer", _FIELDS)
    name = text(fields["name"], "name")
    where = name[:200]
    shape = tensor_shape(fields["shape"], f"{where}: shape")
    header = TensorHeader(name, shape, tensor_dtype(fields["dtype"], f"{where}: dtype"))
    offset = natural(fields["offset"], f"{where}: offset")
    if offset + header.num_bytes > num_bytes:
        raise RequestRejected(
            f"{where}: bytes {offset} to {offset + header.num_bytes} are not within the buffer of {num_bytes}"
        )
    return header, offset


class StateDictConversation(_Conversation[Plan]):
    """Implements `control.weights.Conversation` over broadcasts. The sender gets no answers.

    After a problem the rest is still received, since the sender would wait for ever in its broadcasts.

    Args:
        timeout_s: how long each broadcast may take.
    """

    def __init__(self, plan: MakePlan[Plan], group: WeightGroup, timeout_s: float) -> None:
        super().__init__(plan)
        self._group = group
        self._timeout_s = timeout_s
        self._receiving = _state_dicts(group.device.type != "cpu")
        self._broadcasts: Broadcasts | None = None
        self._is_over = False

    def poll(self) -> bool:
        while not self._owes_answer:
            if self._is_over:
                raise RequestRejected(f"nothing of the update is served: {self._refused}")
            arrived = None
            if self._broadcasts is not None:
                if not self._broadcasts.is_done:
                    return False
                arrived = self._broadcasts.result()
            self._broadcasts = None
            self._go_on(arrived)
        return True

    def close(self) -> None:
        """Leave the group if the trainer is in the middle of an update."""
        self.bucket = None
        if not self._is_over:
            self._is_over = True
            self._refused = self._refused or "the update was given up"
            self._group.close("an update ended before all of its broadcasts had arrived")

    def _go_on(self, arrived: list[Tensor] | None) -> None:
        try:
            asked = next(self._receiving) if arrived is None else self._receiving.send(arrived)
        except StopIteration:
            self._is_over = True
            self._owes_answer = not self._refused
            return
        except RequestRejected:
            # It is unknown what would come next, so the group is left.
            self.close()
            raise
        if isinstance(asked, WeightSource):
            self.bucket, self._owes_answer = asked, True
        else:
            self._broadcasts = self._group.receive(asked, self._timeout_s)


def _state_dicts(is_on_device: bool) -> _Receiving:
    for _ in range(_number((yield _NUMBER), "state dicts", MAX_STATE_DICTS)):
        num_bytes = _number((yield _NUMBER), "bytes of a list", MAX_PICKLE_BYTES)
        [pickled] = yield [((num_bytes,), torch.uint8)]
        listed = _listed(bytes(pickled.cpu().numpy()))
        flat = yield [((sum(_numel(one) for one in headers),), dtype) for dtype, headers in listed.items()]
        tensors = {
            header.name: part.view(header.shape)
            for headers, whole in zip(listed.values(), flat, strict=True)
            for header, part in zip(headers, torch.split(whole, [*map(_numel, headers)]), strict=True)
        }
        entries = [header for headers in listed.values() for header in headers]
        rows = [(entry.name, tensors[entry.name]) for entry in entries]
        yield WeightSource(entries, rows.copy, is_on_device=is_on_device)


def _number(arrived: list[Tensor], what: str, most: int) -> int:
    found = int(arrived[0])
    if not 0 <= found <= most:
        raise RequestRejected(f"the trainer announced {found} {what}: expected 0 to {most}")
    return found


def _listed(pickled: bytes) -> dict[torch.dtype, list[TensorHeader]]:
    """The headers of a state dict by dtype, in the order of the broadcasts."""
    said = read_pickle(pickled, _resolve)
    if not isinstance(said, dict):
        raise RequestRejected(f"a state dict: expected lists of tensors by dtype, got {kind_of(said)}")
    listed = {}
    for key, rows in said.items():
        dtype = dtype_named(text(key, "a state dict: dtype"), "a state dict")
        if not isinstance(rows, list):
            raise RequestRejected(f"a state dict: {dtype}: expected a list of tensors, got {kind_of(rows)}")
        listed[dtype] = [_header(row, dtype) for row in rows]
    names = [header.name for headers in listed.values() for header in headers]
    if len(set(names)) != len(names):
        raise RequestRejected("a state dict: a tensor is named twice")
    return listed


def _resolve(module: str, name: str) -> object:
    """As `resolve_global`, but a dtype becomes its name, since dtypes are keys here."""
    found = resolve_global(module, name)
    return name if isinstance(found, torch.dtype) else found


def _header(row: object, dtype: torch.dtype) -> TensorHeader:
    if not isinstance(row, tuple | list) or len(row) != 3:
        raise RequestRejected(f"a state dict: expected (name, shape, number of elements), got {kind_of(row)}")
    name = text(row[0], "name")
    header = TensorHeader(name, tensor_shape(row[1], f"{name[:200]}: shape"), dtype)
    if natural(row[2], f"{name[:200]}: number of elements") != _numel(header):
        raise RequestRejected(f"{name[:200]}: {row[2]} elements do not make {list(header.shape)}")
    return header


def _numel(header: TensorHeader) -> int:
    return math.prod(header.shape)
