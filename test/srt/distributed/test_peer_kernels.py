"""The kernels that add up through peer memory, without a GPU: in Triton's interpreter.

That is chosen before triton is imported, and others may have chosen otherwise: it runs in a process of its
own. It knows no assembler, so that is written here once more, and it runs block after block.
"""

import ctypes
import mmap
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fixtures.deadlines import HANG_S
from torch import Tensor

NUM_CALLS = 12


def test_ranks_add_up_call_after_call() -> None:
    pytest.importorskip("triton")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TRITON_INTERPRET": "1"}
    command = [sys.executable, __file__]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-4000:]


def interpret() -> None:
    """Two ranks, and three, each a process with its memory in a file that all map."""
    from ebbtide.srt.distributed import peer_kernels

    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    for size in (2, 3):
        with tempfile.TemporaryDirectory() as folder:
            paths = [Path(folder, str(rank)) for rank in range(size)]
            for path in paths:
                path.write_bytes(bytes(peer_kernels.num_bytes(size)))
            ranks = [context.Process(target=add_up, args=(rank, paths)) for rank in range(size)]
            for process in ranks:
                process.start()
            for process in ranks:
                process.join(HANG_S)
            codes = [process.exitcode for process in ranks]
            for process in ranks:
                process.kill()
        assert codes == [0] * size, codes


def add_up(rank: int, paths: Sequence[Path]) -> None:
    """Sums of numbers of all ranks, by all kernels, of sizes from one number to several blocks."""
    from triton.runtime import interpreter

    interpreter.InterpreterBuilder.create_inline_asm = assembler
    maps = [mmap.mmap(os.open(path, os.O_RDWR), 0) for path in paths]
    places = [(ctypes.c_char * len(each)).from_buffer(each) for each in maps]
    memories = torch.tensor([ctypes.addressof(place) for place in places])
    # The same on all ranks, but for their naps.
    order, naps = random.Random(3), random.Random(rank)
    size = len(paths)
    for call in range(NUM_CALLS):
        kernel, add = order.choice(("words", "one_shot", "two_shot")), order.random() < 0.5
        # For two bytes to hold them, no numbers beyond 1000.
        count = order.choice((4, 8, 700, 2048, 2052, 4100)) * size
        numbers = (torch.arange(count) % 97 + call).to(torch.float16 if kernel == "words" else torch.float32)
        x, onto = numbers * (rank + 1), torch.full_like(numbers, 0.5)
        time.sleep(naps.choice((0.0, 0.02)))
        out = launch(kernel, x, onto if add else x, memories, rank, add)
        total = numbers * sum(range(1, size + 1))
        assert torch.equal(out, total + 0.5 if add else total), (call, kernel, count, add)


def launch(name: str, x: Tensor, out: Tensor, memories: Tensor, rank: int, add: bool) -> Tensor:
    """Few blocks: the longest messages take each of them several times."""
    from ebbtide.srt.distributed import peer_kernels

    size = len(memories)
    constants = {"SIZE": size, "ADD": add, "OVERLAPPED": False}
    if name == "words":
        count, constants["TILE"] = len(x) // 4, peer_kernels.SLOT_WORDS
        num_blocks = -(-count // peer_kernels.SLOT_WORDS)
    else:
        count, constants["TILE"] = len(x), peer_kernels.SLOT_BYTES // 4
        constants["LANES"] = 1 << (size - 1).bit_length()
        num_blocks = 2
    getattr(peer_kernels, name)[(num_blocks,)](x, out, memories, count, rank, **constants)
    return out


def assembler(self: Any, asm: str, constraints: str, values: Any, types: Any, *_: Any) -> Any:
    """What the three pieces of assembler in these kernels do."""
    from triton import language
    from triton.runtime.interpreter import TensorHandle

    rows = list(zip(*(value.data.tolist() for value in values), strict=True))
    if "ld.acquire.sys" in asm:
        for address, step in rows:
            wait_until(partial(is_set, address, step))
    elif "st.relaxed.sys" in asm:
        for address, value, step in rows:
            for half in range(2):
                word(address + 8 * half).value = value >> 32 * half & 0xFFFFFFFF | step << 32
    else:
        assert "ld.relaxed.sys" in asm
        data = np.array([read_word(address, step) for address, step, _ in rows], dtype=np.int64)
        return SimpleNamespace(get_result=lambda _: TensorHandle(data, language.int64))
    done = TensorHandle(np.zeros(len(rows), dtype=np.int32), language.int32)
    return SimpleNamespace(get_result=lambda _: done)


def is_set(address: int, step: int) -> bool:
    return word(address).value >= step


def read_word(address: int, step: int) -> int:
    """What lies in two halves there, once both have the step beside them."""
    halves = [word(address), word(address + 8)]
    wait_until(lambda: all(half.value >> 32 == step for half in halves))
    return sum((half.value & 0xFFFFFFFF) << 32 * index for index, half in enumerate(halves))


def word(address: int) -> ctypes.c_int64:
    return ctypes.c_int64.from_address(address)


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + HANG_S
    while not is_so():
        assert time.monotonic() < deadline_s, "a rank does not come"
        time.sleep(0)


if __name__ == "__main__":
    interpret()
