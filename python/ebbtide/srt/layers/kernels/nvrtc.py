"""Compiles kernels in CUDA with NVRTC, which comes with torch, and launches them through the driver.

Compiled kernels are kept in Triton's cache.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from ebbtide.srt.layers.kernels.launch import current_stream

# The most shared memory of a block on Hopper.
MAX_SHARED_BYTES: Final = 232448
_FILE = "kernel.cubin"
_MAX_DYNAMIC_SHARED_BYTES = 8
_KINDS = {torch.float8_e4m3fn: 0, torch.float32: 7, torch.bfloat16: 9}
_NO_SWIZZLE, _SWIZZLE_128 = 0, 3
_PROMOTE_256 = 3
_MAP_BYTES, _MAP_MULTIPLE = 128, 64

_AHEAD: ContextVar[tuple[Executor, dict[str, Future[bytes]]] | None] = ContextVar("ahead", default=None)


@contextmanager
def compiling_ahead(executor: Executor) -> Iterator[None]:
    """Within, compile kernels in the executor (`compile_ahead`), and launch none. Ends when all are done."""
    started: dict[str, Future[bytes]] = {}
    token = _AHEAD.set((executor, started))
    try:
        yield
    finally:
        _AHEAD.reset(token)
        for future in started.values():
            future.exception()


def is_ahead() -> bool:
    """Whether the caller is within `compiling_ahead`."""
    return _AHEAD.get() is not None


def compile_ahead(text: str, options: tuple[str, ...]) -> None:
    """Start compiling a kernel, unless that has been started. Call it within `compiling_ahead`."""
    ahead = _AHEAD.get()
    assert ahead is not None
    executor, started = ahead
    if text not in started:
        started[text] = executor.submit(compiled, text, options)


def compiled(text: str, options: tuple[str, ...]) -> bytes:
    """Machine code for Hopper, from the cache of Triton's kernels if it is there.

    Raises:
        ImportError: the package cuda-bindings is not installed.
        OSError: the cache cannot be read or written.
        RuntimeError: compiling failed, with the compiler's message; or there is no NVRTC.
    """
    from triton.runtime.cache import get_cache_manager

    nvrtc = import_module("cuda.bindings.nvrtc")
    wanted = ["--gpu-architecture=sm_90a", "-std=c++17", *options]
    key = "\0".join((text, *wanted, str(nvrtc.nvrtcVersion())))
    cache = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    if (path := cache.get_file(_FILE)) is not None:
        return Path(path).read_bytes()
    cubin = _compile(nvrtc, text.encode(), [option.encode() for option in wanted])
    cache.put(cubin, _FILE, binary=True)
    return cubin


def _compile(nvrtc: Any, text: bytes, options: list[bytes]) -> bytes:
    _, program = nvrtc.nvrtcCreateProgram(text, b"kernel.cu", 0, [], [])
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if int(status):
            _, size = nvrtc.nvrtcGetProgramLogSize(program)
            log = bytes(size)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise RuntimeError(log.decode(errors="replace").strip("\0 \n"))
        _, size = nvrtc.nvrtcGetCUBINSize(program)
        cubin = bytes(size)
        nvrtc.nvrtcGetCUBIN(program, cubin)
        return cubin
    finally:
        nvrtc.nvrtcDestroyProgram(program)


@cache
def driver() -> Any:
    """CUDA's driver library."""
    return ctypes.CDLL("libcuda.so.1")


def call(name: str, *arguments: Any) -> None:
    """Call a function of the driver.

    Raises:
        RuntimeError: it failed; the message has its name and the driver's description.
    """
    if status := getattr(driver(), name)(*arguments):
        text = ctypes.c_char_p()
        driver().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"{name}: {(text.value or b'').decode() or status}")


class TensorMap:
    """A tensor map: it tells the bulk copy engine (TMA) about a matrix [R, C] and the boxes to copy.

    Args:
        x_RC: its first rows and columns are the matrix; columns are contiguous, and rows begin at multiples
            of 16 bytes.
        shape: R and C.
        box: rows and columns.
        is_swizzled: a box has rows of 128 bytes, in the layout in which tensor cores read shared memory.
    """

    def __init__(
        self, x_RC: Tensor, shape: tuple[int, int], box: tuple[int, int], *, is_swizzled: bool
    ) -> None:
        self._room = ctypes.create_string_buffer(_MAP_BYTES + _MAP_MULTIPLE)
        self.address = -(-ctypes.addressof(self._room) // _MAP_MULTIPLE) * _MAP_MULTIPLE
        call(
            "cuTensorMapEncodeTiled",
            ctypes.c_void_p(self.address),
            _KINDS[x_RC.dtype],
            2,
            ctypes.c_void_p(x_RC.data_ptr()),
            (ctypes.c_uint64 * 2)(shape[1], shape[0]),
            (ctypes.c_uint64 * 1)(x_RC.stride(0) * x_RC.element_size()),
            (ctypes.c_uint32 * 2)(box[1], box[0]),
            (ctypes.c_uint32 * 2)(1, 1),
            0,
            _SWIZZLE_128 if is_swizzled else _NO_SWIZZLE,
            _PROMOTE_256,
            0,
        )


class Kernel:
    """A kernel, in the context of torch's current device.

    Args:
        cubin: from `compiled`.
        name: of the kernel in the source, where it must be unique.
        threads, shared_bytes: of a block.

    Raises:
        RuntimeError: there is no such kernel, or the driver does not load it.
    """

    def __init__(self, cubin: bytes, name: str, threads: int, shared_bytes: int) -> None:
        # Match sections of machine code only, since other symbols may contain the kernel's name too.
        found = re.search(rb"\.text\.(_Z\w*" + name.encode() + rb"\w*)", cubin)
        if found is None:
            raise RuntimeError(f"{len(cubin)} bytes of machine code have no kernel {name}")
        module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        call("cuModuleLoadData", ctypes.byref(module), cubin)
        call("cuModuleGetFunction", ctypes.byref(self._function), module, found.group(1))
        call("cuFuncSetAttribute", self._function, _MAX_DYNAMIC_SHARED_BYTES, shared_bytes)
        self._threads, self._shared_bytes = threads, shared_bytes

    def launch(
        self, programs: int, device: torch.device, *arguments: TensorMap | ctypes.Structure | ctypes.c_uint64
    ) -> None:
        """Launch the kernel on torch's current stream."""
        places = [x.address if isinstance(x, TensorMap) else ctypes.addressof(x) for x in arguments]
        grid, block = (programs, 1, 1), (self._threads, 1, 1)
        stream = ctypes.c_void_p(current_stream(device))
        given = (ctypes.c_void_p * len(places))(*places)
        call("cuLaunchKernel", self._function, *grid, *block, self._shared_bytes, stream, given, None)
