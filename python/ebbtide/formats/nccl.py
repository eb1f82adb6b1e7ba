"""NCCL without torch's process groups, for trainers that use it like this. Calls the library of torch.

The communicator is non-blocking, so that it can be aborted at a time limit even if its peers hang.
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
# Most calls end within microseconds: a wait polls quickly at first, then each time after twice as long.
_FIRST_LOOK_S: Final = 1e-5
_LOOK_S: Final = 1e-3
_UINT8: Final = 1
# NCCL's types, which peers may check. Other dtypes are sent as bytes, since a broadcast only copies them.
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
    """A call of NCCL failed, or the communicator was aborted."""


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * UNIQUE_ID_BYTES),)


class _Config(ctypes.Structure):
    """ncclConfig_t as of NCCL 2.14; NCCL uses defaults for fields of later versions."""

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
    """Load NCCL: the library that torch has loaded already. Raises NcclFailed."""
    try:
        return ctypes.CDLL("libnccl.so.2")
    except OSError as error:
        raise NcclFailed(f"NCCL cannot be loaded: {error}") from error


def make_unique_id() -> bytes:
    """Make the id of a new communicator, which all its ranks need. Raises NcclFailed."""
    library, unique_id = load_library(), _UniqueId()
    status = library.ncclGetUniqueId(ctypes.byref(unique_id))
    if status != _SUCCESS:
        raise NcclFailed(f"ncclGetUniqueId: {status}")
    return bytes(unique_id)


class RawNccl:
    """One rank of a communicator, with the methods of torch's backends that a weight group uses.

    The constructor waits until all ranks have called it.

    Args:
        unique_id: of the communicator, made by one rank.
        timeout_s: how long to wait for the other ranks.

    Raises:
        NcclFailed: other ranks did not come in time, or NCCL failed.
    """

    def __init__(
        self, unique_id: bytes, rank: int, world_size: int, device: torch.device, timeout_s: float
    ) -> None:
        self._library = load_library()
        self._device = device
        self._comm = ctypes.c_void_p()
        # Held during each call, so that `abort` in another thread comes between calls, not during one.
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
            # Not on the default stream: forward passes there would wait for the other ranks too.
            with torch.Stream(device) if device.type == "cuda" else nullcontext():
                self._warm_up(until_s)
        except BaseException:
            self.abort()
            raise

    def broadcast(self, tensors: list[Tensor], options: Any) -> Launched:
        """Launch a broadcast from `options.rootRank` on the current stream.

        Args:
            tensors: one contiguous tensor.
            options: torch's `BroadcastOptions`.

        Raises:
            NcclFailed: it was not launched within `options.timeout`, or NCCL failed.
        """
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
        """Abort the communicator and what is under way in it. Idempotent; callable from any thread."""
        with self._lock:
            if not self._is_given_up and self._comm:
                with suppress(AttributeError):
                    self._library.ncclCommAbort(self._comm)
            self._is_given_up = True

    def _warm_up(self, until_s: float) -> None:
        """Take part in the all-reduce that vLLM's communicators begin with: without it the others hang."""
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
    """All work launched on the current stream so far, like torch's `Work`."""

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._event = torch.cuda.current_stream(device).record_event() if is_cuda else None

    def is_completed(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self) -> None:
        """Does nothing: later work on the same stream comes after it anyway."""
