"""Small copies between host and device that never make the host wait for the device."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(array: NDArray[Any] | list[int] | list[float], device: torch.device) -> Tensor:
    """The array as a tensor on the device; lists become int64 or float32.

    On CUDA it goes through pinned memory, which torch keeps from reuse until the copy has run.
    """
    tensor = torch.from_numpy(array) if isinstance(array, np.ndarray) else torch.tensor(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def download(tensor: Tensor) -> Tensor:
    """The tensor on the host. On CUDA its values are only there after the work launched so far has run."""
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
