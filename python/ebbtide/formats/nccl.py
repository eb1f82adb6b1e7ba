"""NCCL without torch's process groups, for trainers that use it so: through the library that torch loads.

Every call returns at once, so that a communicator can be given up at a deadline, whatever its peers do.
Source: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api/comms.html.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from datetime import timedelta
from typing import Any, Final

import torch
from torch import Tensor

from ebbtide.srt.errors import EngineError

UNIQUE_ID_BYTES: Final = 128
_SUCCESS, _IN_PROGRESS = 0, 7
_SUM: Final = 0
# Most calls settle within microseconds: a wait begins with short looks, each twice as long as the one before.
_FIRST_LOOK_S: Final = 1e-5
_LOOK_S: Final = 1e-3
_UINT8: Final = 1
# Peers compare types; whatever is sent is copied byte for byte.
_TYPES: Final = {
    torch.int8: 0,
    torch.uint8: _UINT8,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}


class NcclFailed(EngineError):
    """A call of NCCL's failed, or its communicator was given up."""


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * UNIQUE_ID_BYTES),)


class _Config(ctypes.Structure):
    """The first fields of ncclConfig_t; what its version does not have is as NCCL likes it."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    )

    @classmethod
    def without_waiting(cls) -> _Config:
        return cls(size=ctypes.sizeof(cls), magic=0xCAFEBEEF, version=21400, blocking=0)


def load_library() -> Any:
    """The library that torch has loaded, or NcclFailed."""
    try:
        return ctypes.CDLL("libnccl.so.2")
    except OSError as error:
        raise NcclFailed(f"NCCL cannot be loaded: {error}") from error


def make_unique_id() -> bytes:
    """The id of a new communicator, which all of its ranks need. Raises `NcclFailed`."""
    library, unique_id = load_library(), _UniqueId()
    status = library.ncclGetUniqueId(ctypes.byref(unique_id))
    if status != _SUCCESS:
        raise NcclFailed(f"ncclGetUniqueId: {status}")
    return bytes(unique_id)


class RawNccl:
    """One rank of a communicator, with the methods of torch's backends that a weight group uses.

    All ranks make theirs at the same time; rank 0 of them has made the id. NcclFailed: the others did not
    come in time, or NCCL does not work.
    """

    def __init__(
        self, unique_id: bytes, rank: int, world_size: int, device: torch.device, timeout_s: float
    ) -> None:
        self._library = load_library()
        self._device = device
        self._comm = ctypes.c_void_p()
        # Held for a call: another thread may give the communicator up in between, but not meanwhile.
        self._lock = threading.Lock()
        self._is_given_up = False
        until_s = time.monotonic() + timeout_s
        ident, config = _UniqueId.from_buffer_copy(unique_id), _Config.without_waiting()
        try:
            self._do(
                "ncclCommInitRankConfig",
                (ctypes.byref(self._comm), world_size, ident, rank, ctypes.byref(config)),
                until_s,
            )
            # The default stream has forward passes, which would wait for the others too.
            with torch.Stream(device) if device.type == "cuda" else nullcontext():
                self._warm_up(until_s)
        except BaseException:
            self.abort()
            raise

    def broadcast(self, tensors: list[Tensor], options: Any) -> Launched:
        """Launch one on the current stream, of a single contiguous tensor, from `options.rootRank`."""
        [tensor] = tensors
        kind = _TYPES.get(tensor.dtype, _UINT8)
        count = tensor.nbytes if kind == _UINT8 else tensor.numel()
        timeout: timedelta = options.timeout
        place = ctypes.c_void_p(tensor.data_ptr())
        what = (place, place, ctypes.c_size_t(count), kind, options.rootRank)
        until_s = time.monotonic() + timeout.total_seconds()
        self._do("ncclBroadcast", (*what, self._comm, self._stream()), until_s)
        return Launched(self._device)

    def abort(self) -> None:
        """End what is under way, and give the communicator up. Idempotent; from any thread."""
        with self._lock:
            if not self._is_given_up and self._comm:
                with suppress(AttributeError):
                    self._library.ncclCommAbort(self._comm)
            self._is_given_up = True

    def _warm_up(self, until_s: float) -> None:
        """What every rank of such a group does first; one that leaves it out hangs the others."""
        one = torch.zeros(1, device=self._device)
        place = ctypes.c_void_p(one.data_ptr())
        what = (place, place, ctypes.c_size_t(1), _TYPES[one.dtype], _SUM)
        self._do("ncclAllReduce", (*what, self._comm, self._stream()), until_s)
        launched = Launched(self._device)
        self._wait(launched.is_completed, until_s)

    def _do(self, name: str, arguments: tuple[Any, ...], until_s: float) -> None:
        with self._lock:
            self._require_held()
            status = getattr(self._library, name)(*arguments)
        self._check(name, status)
        self._wait(lambda: self._has_settled(name), until_s)

    def _has_settled(self, name: str) -> bool:
        state = ctypes.c_int(_SUCCESS)
        with self._lock:
            self._require_held()
            self._check(name, self._library.ncclCommGetAsyncError(self._comm, ctypes.byref(state)))
        self._check(name, state.value)
        return state.value == _SUCCESS

    def _wait(self, is_done: Callable[[], bool], until_s: float) -> None:
        look_s = _FIRST_LOOK_S
        while not is_done():
            if time.monotonic() > until_s:
                self.abort()
                raise NcclFailed("the other ranks of the group did not come in time")
            time.sleep(look_s)
            look_s = min(2 * look_s, _LOOK_S)

    def _check(self, name: str, status: int) -> None:
        if status not in (_SUCCESS, _IN_PROGRESS):
            describe = self._library.ncclGetErrorString
            describe.restype = ctypes.c_char_p
            raise NcclFailed(f"{name}: {describe(status).decode()}")

    def _require_held(self) -> None:
        if self._is_given_up:
            raise NcclFailed("the communicator was given up")

    def _stream(self) -> ctypes.c_void_p:
        is_cuda = self._device.type == "cuda"
        return ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream if is_cuda else None)


class Launched:
    """All that the current stream was given up to here."""

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._event = torch.cuda.current_stream(device).record_event() if is_cuda else None

    def is_completed(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self) -> None:
        """What is launched on the same stream comes after it anyway."""
