"""Weights that checkpoint-engine brings for `update_weights_from_ipc`: a conversation with a sender.

The sender, on the same GPU, offers one buffer of its memory and says what it has filled it with, again and
again. Each rank has a sender of its own. Source: wire_api section 4.5.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, Final

import torch
import zmq

from ebbtide.formats.allowed_globals import (
    SenderFailure,
    cuda_tensor,
    kind_of,
    record_fields,
    resolve_offer,
    tensor_dtype,
    text,
)
from ebbtide.formats.bucket import tensors_in
from ebbtide.formats.pickle_reader import read_pickle
from ebbtide.formats.tensor_refs import CudaStorageRef, TensorHeader, natural, tensor_shape
from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.weight_sync.borrowed_memory import BorrowedMemory
from ebbtide.srt.weight_sync.cuda_memory import CudaIpc
from ebbtide.srt.weight_sync.source import WeightSource

MAX_MESSAGE_BYTES: Final = 64 << 20
# How long a last answer is kept for a sender that does not take it.
LINGER_MS: Final = 2000
_FIELDS: Final = ("name", "shape", "dtype", "offset")
_DONE: Final = b""


class _Stage(enum.Enum):
    """What the sender says next."""

    BUFFER = enum.auto()
    BUCKETS = enum.auto()
    END = enum.auto()  # the buffer has been given back
    LAST_WORD = enum.auto()  # the buffer was refused: it says something to that, and no more
    FAILED = enum.auto()  # nothing


class IpcConversation:
    """One rank's end of an update.

    `poll` until it is true. Then `bucket` is what is to be written, and `answer` says how that went; or
    `bucket` is None: everything has come, and `answer` says what has become of the update. `close` it,
    wherever it has got to.

    Args:
        address: where the sender listens, `ipc://...`.
        cuda: opens memory on the device of this rank.
    """

    def __init__(self, address: str, cuda: CudaIpc) -> None:
        self._cuda = cuda
        self._memory = BorrowedMemory(cuda)
        self._buffer: torch.Tensor | None = None
        self._stage = _Stage.BUFFER
        self._owes_answer = False
        self._refused = ""
        self._bucket: WeightSource | None = None
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        # It reports nothing of a sender that is not there yet.
        self._ends: zmq.Socket[bytes] = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self._close_sockets()
            raise RequestRejected(
                f"zmq_handles: {address[:200]!r} cannot be connected to: {error}"
            ) from error

    @property
    def bucket(self) -> WeightSource | None:
        """The tensors that the buffer holds now; None once everything has come."""
        return self._bucket

    def poll(self) -> bool:
        """Whether a bucket has come, or everything has.

        Raises:
            RequestRejected: 400, the sender gave up, or has ended, or said what it should not.
        """
        # This is asked ahead of the messages, since the end comes behind the last of them.
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
        """Answer the sender: it is done, or what went wrong. After a problem the update will be refused."""
        self._refused = self._refused or problem
        self._owes_answer = False
        self._bucket = None
        self._socket.send(problem.encode() or _DONE)

    def close(self) -> None:
        """Give the buffer back, and leave nobody waiting. Idempotent."""
        if self._owes_answer:
            self.answer("the update was given up")
        self._close_buffer()
        self._close_sockets()

    def _close_sockets(self) -> None:
        if not self._socket.closed:
            self._socket.disable_monitor()
        self._ends.close()
        self._socket.close()

    def _take(self, message: bytes) -> None:
        """Do what the sender says, and answer it; but for what the caller is to do."""
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
                self._bucket = self._read(said)
            case _Stage.BUCKETS, None:
                self._close_buffer()
                self._stage = _Stage.END
                self.answer()
            case _Stage.END, None if not self._refused:
                pass  # Everything has come.
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
        for _ in self._memory.open():
            pass
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
        self._bucket = None
        self._buffer = None
        self._memory.close()


def open_conversation(zmq_handles: Mapping[str, str], cuda: CudaIpc | None) -> IpcConversation:
    """This rank's end of an update.

    Args:
        zmq_handles: addresses by device, `GPU-<uuid>`.
        cuda: of the device that this rank runs on; None where that is the CPU.

    Raises:
        RequestRejected: 400, there is no address for this device, or it is not one.
    """
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
    return IpcConversation(addresses[own], cuda)


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
