"""Broadcasts many tensors in few broadcasts. Source: wire_vllm section 2.3."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor

from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

DEFAULT_PACKED_BUFFER_SIZE_BYTES: Final = 1 << 30
DEFAULT_PACKED_NUM_BUFFERS: Final = 2


def packed_nccl_broadcast_producer(
    iterator: Iterator[Any],
    group: PyNcclCommunicator,
    src: int,
    post_iter_func: Callable[[Any], Tensor],
    buffer_size_bytes: int = DEFAULT_PACKED_BUFFER_SIZE_BYTES,
    num_buffers: int = DEFAULT_PACKED_NUM_BUFFERS,
) -> None:
    """Broadcast tensors packed as bytes, up to and including the one that exceeds the buffer.

    Args:
        post_iter_func: converts an item of the iterator to a tensor.
        num_buffers: ignored: each broadcast waits for the one before.
    """
    pending: list[Tensor] = []
    num_bytes = 0
    for item in iterator:
        tensor = post_iter_func(item).contiguous().to(group.device).view(-1).view(torch.uint8)
        pending.append(tensor)
        num_bytes += tensor.numel()
        if num_bytes > buffer_size_bytes:
            group.broadcast(torch.cat(pending), src)
            pending, num_bytes = [], 0
    if pending:
        group.broadcast(torch.cat(pending), src)
