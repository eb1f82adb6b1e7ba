"""Options for launching Triton kernels, and properties of a device."""

from functools import cache
from typing import Any

import torch
from torch import Tensor


def overlap_options(x: Tensor) -> dict[str, Any]:
    """Launch options for a kernel that may start before the previous kernel on the stream has ended.

    The kernel must wait (`gdc_wait`) if OVERLAPPED is true, which it is on Hopper and later.
    """
    overlapped = x.is_cuda and can_overlap(x.device)
    return {"OVERLAPPED": overlapped} | ({"launch_pdl": True} if overlapped else {})


@cache
def can_overlap(device: torch.device) -> bool:
    """Whether a kernel may start before the previous one has ended: on Hopper and later."""
    return compute_capability(device) >= (9, 0)


@cache
def compute_capability(device: torch.device) -> tuple[int, int]:
    """The compute capability (major, minor) of a GPU; (0, 0) on a CPU, where kernels are interpreted."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def current_stream(device: torch.device) -> int:
    """The handle of torch's current stream on a GPU."""
    handle: int = torch.cuda.current_stream(device).cuda_stream
    return handle


@cache
def num_multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors; on a CPU, where kernels are interpreted, that of a small GPU."""
    if device.type != "cuda":
        return 4
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


@cache
def arrivals(device: torch.device, count: int) -> Tensor:
    """`count` zeros for counters, shared by all kernels, which run one by one and must reset them."""
    return torch.zeros(count, dtype=torch.int32, device=device)


@cache
def card(device: torch.device) -> str:
    """The name of a GPU; for other devices, their type."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


# Compute capability → the cards on which tiles were measured.
_MEASURED = {(9, 0): ("NVIDIA H200", "NVIDIA H100 80GB HBM3")}


@cache
def cards_like(device: torch.device) -> tuple[str, ...]:
    """The measured cards with this device's compute capability."""
    return _MEASURED.get(compute_capability(device), ()) if device.type == "cuda" else ()
