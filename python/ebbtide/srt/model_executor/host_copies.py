"""Small copies between host and device that never make the host wait for the device."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Arrays in one copy begin at multiples of this: the widest element here has 8 bytes.
ALIGNMENT_BYTES = 16

TORCH_DTYPES = {np.dtype(np.int64): torch.int64, np.dtype(np.int32): torch.int32}


def upload(array: NDArray[Any] | list[int] | list[float], device: torch.device) -> Tensor:
    """The array as a tensor on the device; lists become int64 or float32.

    On CUDA it goes through pinned memory, which torch keeps from reuse until the copy has run.
    """
    tensor = torch.from_numpy(array) if isinstance(array, np.ndarray) else torch.tensor(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


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


def download(tensor: Tensor) -> Tensor:
    """The tensor on the host. On CUDA it holds nothing before the work launched so far has run."""
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
