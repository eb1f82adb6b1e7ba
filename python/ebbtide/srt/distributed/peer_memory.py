"""All-reduce over the GPUs of one host through peer memory: memory that ranks open to each other.

A message of a decode step is so small that one kernel, which pushes it to the other ranks over NVLink and
adds up theirs, takes a few microseconds, less than a collective of NCCL. NCCL serves long messages.
"""

from __future__ import annotations

import ctypes
import json
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch
from torch import Tensor

from ebbtide.srt.errors import EbbtideError, EngineError
from ebbtide.srt.memory_saver.virtual_memory.cuda import CudaDriver

logger = logging.getLogger(__name__)

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_HANDLE_BYTES: Final = 64
_BUS_ID_BYTES: Final = 32
_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
# Measured with two and with four ranks. `words` is the fastest up to these two limits. Beyond them,
# `one_shot` with two ranks beats NCCL up to the longest message measured, by a margin that shrinks slowly.
# With more ranks it pushes all of a message to each rank; `two_shot` pushes half as much with four, and beats
# NCCL, but from 8 MiB on by little. NCCL with sums in the switch (NVLink multicast) was not measured.
WORDS_PUSHED_BYTES: Final = 384 << 10
MAX_WORDS_BYTES: Final = 256 << 10
ONE_SHOT_PUSHED_BYTES: Final = 1536 << 10
MAX_BYTES_OF_TWO: Final = 64 << 20
MAX_BYTES_OF_MORE: Final = 8 << 20
_WORD_BYTES: Final = 8
# The first launch includes compiling the kernels, on each rank in its own time.
FIRST_MEETING_S: Final = 120.0
# How long a rank that leaves waits for the others to close its memory.
LEAVE_S: Final = 1.0


@dataclass(frozen=True)
class Offer:
    """What another process needs in order to open a rank's memory.

    Attributes:
        handle: of CUDA IPC, in hexadecimal.
        bus_id: the device's PCI bus id. CUDA reports opened memory as being on the opener's own device.
    """

    handle: str
    bus_id: str


class PeerMemory:
    """The peer memory of this rank and of all others, and the all-reduce kernels that use it.

    It is outside torch's allocator and all arenas, and never moves, so that CUDA graphs may capture calls.

    Args:
        store: a store that all ranks of the group can reach.
        device: of this rank. It must be torch's current device at every call; all calls are on one stream, or
            on streams that wait for each other.

    Attributes:
        num_bytes: the size of this rank's memory: 5 MiB for each rank of the group.
        max_bytes: the largest message.
        offer: what the other ranks open this memory with.
    """

    def __init__(self, store: Any, rank: int, size: int, device: torch.device) -> None:
        self._kernels = _load_kernels()
        self._store, self._rank, self._size, self._device = store, rank, size, device
        self.max_bytes = MAX_BYTES_OF_TWO if size == 2 else MAX_BYTES_OF_MORE
        self._driver = CudaDriver()
        self.num_bytes = self._kernels.num_bytes(size)
        # This first allocation makes torch's CUDA context the current one of this thread.
        self._memories = torch.zeros(size, dtype=torch.int64, device=device)
        self._options = self._launch_options()
        self._opened: list[int] = []
        self._mine = int(self._driver.call("cuMemAlloc", self.num_bytes))
        try:
            self._driver.call("cuMemsetD8", self._mine, 0, self.num_bytes)
            handle = self._driver.call("cuIpcGetMemHandle", self._mine)
            bus_id = self._driver.call("cuDeviceGetPCIBusId", _BUS_ID_BYTES, device.index)
        except EngineError:
            self._driver.call("cuMemFree", self._mine)
            raise
        self.offer = Offer(
            ctypes.string_at(handle.getPtr(), _HANDLE_BYTES).hex(), bus_id.partition(b"\0")[0].decode()
        )

    def open(self, offers: Sequence[Offer]) -> None:
        """Map the memory of all ranks. `offers` are in the order of ranks.

        EngineError: there is no NVLink between two devices.
        """
        addresses = []
        for rank, offer in enumerate(offers):
            addresses.append(self._mine if rank == self._rank else self._open(offer))
        self._memories.copy_(torch.tensor(addresses, dtype=torch.int64))
        # The other ranks may write once all have opened it, so the clearing must be done by then.
        torch.accelerator.synchronize(self._device)

    def takes(self, x: Tensor, onto: Tensor | None = None) -> bool:
        """Whether `all_reduce_` can sum such tensors. The answer is the same on every rank."""
        if x.dtype not in _DTYPES or not 0 < x.nbytes <= self.max_bytes or not _is_aligned(x):
            return False
        return onto is None or (onto.dtype == x.dtype and onto.shape == x.shape and _is_aligned(onto))

    def all_reduce_(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        """Sum x over all ranks: in place, or added to `onto`. Returns the result. Ask `takes` first."""
        pushed_bytes = x.nbytes * (self._size - 1)
        is_short = pushed_bytes <= WORDS_PUSHED_BYTES and x.nbytes <= MAX_WORDS_BYTES
        if is_short and x.itemsize == 2 and x.nbytes % _WORD_BYTES == 0:
            return self.words_(x, onto)
        if self._size == 2 or pushed_bytes <= ONE_SHOT_PUSHED_BYTES:
            return self.one_shot_(x, onto)
        return self.two_shot_(x, onto)

    def words_(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        """`all_reduce_` for 2-byte types, and whole words of 8 bytes up to 256 KiB."""
        tile = self._kernels.SLOT_WORDS
        return self._launch(self._kernels.words, x, onto, x.nbytes // _WORD_BYTES, tile, TILE=tile)

    def one_shot_(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        """`all_reduce_` with one exchange for each piece of 2 MiB."""
        lanes, tile = 1 << (self._size - 1).bit_length(), self._kernels.SLOT_BYTES // x.itemsize
        return self._launch(self._kernels.one_shot, x, onto, x.numel(), tile, LANES=lanes, TILE=tile)

    def two_shot_(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        """`all_reduce_` with two exchanges: each rank adds up a share, and pushes the sums to all."""
        lanes, tile = 1 << (self._size - 1).bit_length(), self._kernels.SLOT_BYTES // x.itemsize
        part = tile * self._size
        return self._launch(self._kernels.two_shot, x, onto, x.numel(), part, LANES=lanes, TILE=tile)

    def let_go(self) -> None:
        """Make this rank's kernels stop waiting for others, now and later. Their sums are wrong then."""
        flags = self._driver.bindings.CUstream_flags
        # A stream of its own, since a kernel that waits may block the default stream.
        stream = self._driver.call("cuStreamCreate", int(flags.CU_STREAM_NON_BLOCKING))
        num_bytes = self._kernels.flags_bytes(self._size)
        self._driver.call("cuMemsetD8Async", self._mine, 0x7F, num_bytes, stream)
        self._driver.call("cuStreamSynchronize", stream)
        self._driver.call("cuStreamDestroy", stream)

    def meet(self, timeout_s: float) -> str | None:
        """Try out all kernels with all ranks, which must call this too. Returns what is wrong, or None."""
        numbers = torch.arange(self._size * 4096, device=self._device) % 13
        expected = (numbers * self._size + sum(range(self._size))).to(torch.bfloat16)
        done = torch.Event(device=self._device)
        sums = []
        for _ in range(3):
            for add in (self.words_, self.one_shot_, self.two_shot_):
                sums.append(add((numbers + self._rank).to(torch.bfloat16)))
        done.record()
        deadline_s = time.monotonic() + timeout_s
        while not done.query():
            if time.monotonic() > deadline_s:
                self.let_go()
                return f"kernels did not meet those of the other ranks within {timeout_s:g} s"
            time.sleep(0.001)
        if not all(torch.equal(each, expected) for each in sums):
            return "sums through peer memory are wrong"
        return None

    def close(self) -> None:
        """Close the other ranks' memory, and free this rank's once the others have closed it.

        If they do not do so in time, it is freed with the process. If kernels still wait for a rank that does
        not come, call `let_go` first.
        """
        with suppress(EbbtideError, RuntimeError):
            torch.accelerator.synchronize(self._device)
            while self._opened:
                self._driver.call("cuIpcCloseMemHandle", self._opened.pop())
            _say(self._store, "closed", self._rank, "yes")
            keys = [_key("closed", rank) for rank in range(self._size)]
            self._store.wait(keys, timedelta(seconds=LEAVE_S))
            self._driver.call("cuMemFree", self._mine)

    def _launch(
        self, kernel: Any, x: Tensor, onto: Tensor | None, count: int, part: int, **constants: int
    ) -> Tensor:
        """Launch a kernel. `part`: how much of `count` a block adds up at a time."""
        out = x if onto is None else onto
        num_blocks = min(-(-count // part), self._kernels.NUM_BLOCKS)
        kernel[(num_blocks,)](
            x,
            out,
            self._memories,
            count,
            self._rank,
            SIZE=self._size,
            ADD=onto is not None,
            num_warps=self._kernels.NUM_WARPS,
            **constants,
            **self._options,
        )
        return out

    def _launch_options(self) -> dict[str, Any]:
        """Options for programmatic dependent launch, from Hopper on: kernels overlap with those before."""
        attribute = self._driver.bindings.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
        overlapped = int(self._driver.call("cuDeviceGetAttribute", attribute, self._device.index)) >= 9
        return {"OVERLAPPED": overlapped} | ({"launch_pdl": True} if overlapped else {})

    def _open(self, offer: Offer) -> int:
        bindings = self._driver.bindings
        there = int(self._driver.call("cuDeviceGetByPCIBusId", offer.bus_id.encode()))
        # The flags are set by atomic operations, which work over NVLink and not over PCIe.
        atomics = bindings.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
        if not int(self._driver.call("cuDeviceGetP2PAttribute", atomics, self._device.index, there)):
            raise EngineError(f"no NVLink between devices {self._device.index} and {there}")
        handle = bindings.CUipcMemHandle()
        ctypes.memmove(handle.getPtr(), bytes.fromhex(offer.handle), _HANDLE_BYTES)
        lazily = int(bindings.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
        address = int(self._driver.call("cuIpcOpenMemHandle", handle, lazily))
        self._opened.append(address)
        return address


def open_peer_memory(store: Any, rank: int, size: int, device: torch.device) -> PeerMemory | None:
    """Open the memory of all ranks and try it out. Returns None, on every rank, if any rank cannot use it.

    RuntimeError: a rank did not come within the store's timeout.
    """
    mine: PeerMemory | None = None
    problem: str | None = None
    try:
        mine = PeerMemory(store, rank, size, device)
    except Exception as error:  # NCCL serves instead, whatever the reason
        problem = _in_a_line(error)
    offer = None if mine is None else asdict(mine.offer)
    said = json.dumps({"host": _host(), "offer": offer, "problem": problem})
    heard = [json.loads(each) for each in _exchange(store, "offer", rank, size, said)]
    problem = _first_problem([each["problem"] for each in heard])
    if problem is None and len({each["host"] for each in heard}) > 1:
        problem = "the ranks are on several hosts"
    if problem is None and mine is not None:
        problem = _try(mine, store, rank, size, [Offer(**each["offer"]) for each in heard])
    if problem is not None:
        if mine is None:
            _say(store, "closed", rank, "yes")
        else:
            mine.close()
            mine = None
    if rank == 0 and mine is None:
        logger.warning("all-reduce by NCCL alone, which takes longer for short messages: %s", problem)
    elif rank == 0 and mine is not None:
        logger.info("short messages are summed through peer memory: buffer_bytes=%d", mine.num_bytes)
    return mine


def _try(mine: PeerMemory, store: Any, rank: int, size: int, offers: list[Offer]) -> str | None:
    """Open all memory and add up once. Returns the first problem of any rank, the same on all ranks."""

    def attempt(stage: str, work: Any, *arguments: Any) -> str | None:
        try:
            problem = work(*arguments)
        except Exception as error:  # NCCL serves instead
            problem = _in_a_line(error)
        answers = _exchange(store, stage, rank, size, json.dumps(problem))
        return _first_problem([json.loads(answer) for answer in answers])

    problem = attempt("open", mine.open, offers)
    return problem if problem is not None else attempt("meet", mine.meet, FIRST_MEETING_S)


def _is_aligned(x: Tensor) -> bool:
    """Whether x is contiguous and begins at a multiple of 16 bytes of its storage, as on all other ranks."""
    return x.is_contiguous() and x.storage_offset() * x.itemsize % 16 == 0


def _exchange(store: Any, stage: str, rank: int, size: int, answer: str) -> list[str]:
    """Publish this rank's answer, and return those of all ranks in their order."""
    _say(store, stage, rank, answer)
    return [store.get(_key(stage, other)).decode() for other in range(size)]


def _say(store: Any, stage: str, rank: int, answer: str) -> None:
    store.set(_key(stage, rank), answer)


def _first_problem(problems: Sequence[str | None]) -> str | None:
    for rank, problem in enumerate(problems):
        if problem is not None:
            return f"rank {rank}: {problem}"
    return None


def _key(stage: str, rank: int) -> str:
    return f"peer_memory/{stage}/{rank}"


def _host() -> str:
    return _BOOT_ID.read_text().strip()


def _in_a_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def _load_kernels() -> ModuleType:
    from ebbtide.srt.distributed import peer_kernels  # needs Triton, which only GPU machines have

    return peer_kernels
