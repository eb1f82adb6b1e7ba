"""How Triton kernels are launched."""

from functools import cache
from typing import Any

import torch
from torch import Tensor


def overlap_options(x: Tensor) -> dict[str, Any]:
    """Options of a kernel that may be in place before its predecessor on the stream has ended.

    The kernel must wait (`gdc_wait`) where its OVERLAPPED is true. Hopper and later do that.
    """
    overlapped = x.is_cuda and can_overlap(x.device)
    return {"OVERLAPPED": overlapped} | ({"launch_pdl": True} if overlapped else {})


@cache
def can_overlap(device: torch.device) -> bool:
    """Whether a kernel may be in place before its predecessor ends: Hopper and later."""
    return compute_capability(device) >= (9, 0)


@cache
def compute_capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a GPU: major and minor number; of a CPU, where kernels are interpreted, 0."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def current_stream(device: torch.device) -> int:
    """The handle of torch's current stream on a GPU."""
    handle: int = torch.cuda.current_stream(device).cuda_stream
    return handle


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; a CPU, where kernels are interpreted, counts as a small one."""
    if device.type != "cuda":
        return 4
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


@cache
def arrivals(device: torch.device, count: int) -> Tensor:
    """`count` zeros, which every kernel leaves as they are: those of a device run one after the other."""
    return torch.zeros(count, dtype=torch.int32, device=device)


@cache
def card(device: torch.device) -> str:
    """What a GPU calls itself; for other devices their type."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


# The cards on which tiles were measured, by compute capability.
_MEASURED = {(9, 0): ("NVIDIA H200", "NVIDIA H100 80GB HBM3")}


@cache
def cards_like(device: torch.device) -> tuple[str, ...]:
    """The cards on which tiles were measured that have the compute capability of this one."""
    return _MEASURED.get(compute_capability(device), ()) if device.type == "cuda" else ()
