"""What a trainer says of its broadcasts. Source: wire_api section 3.3, wire_vllm section 2.3."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Announcement:
    """What the trainer says that it will broadcast: one entry per tensor in each list.

    Attributes:
        dtypes: as torch spells them, with or without "torch.".
        load_format: None for one broadcast per tensor; "flattened_bucket" for one of all their bytes;
            "packed" for several of those, cut by `packed_buffer_bytes`; "sparse" for two per tensor, the
            positions of `num_updates` elements and their values.
    """

    names: Sequence[str]
    dtypes: Sequence[str]
    shapes: Sequence[Sequence[int]]
    load_format: str | None = None
    packed_buffer_bytes: int = 1 << 30
    num_updates: Sequence[int] = ()


def packed_slices(sizes: Sequence[int], buffer_bytes: int) -> list[slice]:
    """Which tensors each packed broadcast holds: up to the one with which they exceed the buffer.

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
