"""Several small arrays to the device in one copy."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Where an array may begin: the widest element here has 8 bytes.
ALIGNMENT_BYTES = 16

TORCH_DTYPES = {np.dtype(np.int64): torch.int64, np.dtype(np.int32): torch.int32}


def upload_all(device: torch.device, **arrays: NDArray[Any]) -> dict[str, Tensor]:
    """The arrays (one-dimensional, int32 or int64) as tensors on the device, by name.

    On CUDA the copy is asynchronous, from pinned memory that torch keeps from reuse until it has run.
    """
    if device.type == "cpu":
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    ranges: dict[str, tuple[int, int]] = {}
    num_bytes = 0
    for name, array in arrays.items():
        ranges[name] = num_bytes, num_bytes + array.nbytes
        num_bytes = -(-(num_bytes + array.nbytes) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    host = pinned(num_bytes)
    write_at(host, {start: arrays[name] for name, (start, _) in ranges.items()})
    on_device = host.to(device, non_blocking=True)
    return {
        name: on_device[start:end].view(TORCH_DTYPES[arrays[name].dtype])
        for name, (start, end) in ranges.items()
    }


def pinned(num_bytes: int) -> Tensor:
    """Host memory, uint8, that the device reads by itself."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def write_at(host: Tensor, arrays: Mapping[int, NDArray[Any]]) -> None:
    """Write arrays into host memory, each at its offset in bytes."""
    memory = host.numpy()
    for start, array in arrays.items():
        memory[start : start + array.nbytes].view(array.dtype)[:] = array
