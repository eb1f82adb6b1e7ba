"""How vLLM's trainers pack tensors into broadcasts. Source: wire_vllm section 2.3."""

from collections.abc import Sequence


def packed_slices(sizes: Sequence[int], buffer_bytes: int) -> list[slice]:
    """Which tensors each broadcast holds: up to the one with which they exceed the buffer.

    Args:
        sizes: bytes of each tensor. They lie one behind the other, without padding.
    """
    slices, first, num_bytes = [], 0, 0
    for index, size in enumerate(sizes):
        num_bytes += size
        if num_bytes > buffer_bytes or index == len(sizes) - 1:
            slices.append(slice(first, index + 1))
            first, num_bytes = index + 1, 0
    return slices
