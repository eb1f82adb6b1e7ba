"""The states of requests: tensors of fixed size for each layer that keeps no keys and values.

States lie in slots behind the pages of the `kv_cache` arena, so they are released and resumed with these. A
running request has the slot of its row in the page table; one more is for padding and for passes of nobody's
request; the slots behind it hold checkpoints, states of prefixes that the prefix cache may hand out.

To whoever saves and restores pages a slot is a run of pages of its own, with ids behind those of the pool.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ebbtide.srt.mem_cache.cache_spec import State
from ebbtide.srt.mem_cache.state_slots import StateSlots
from ebbtide.srt.memory_saver.arena import Arena, round_up

# Tensors of a slot begin at multiples of this: kernels read 16 bytes at a time.
ALIGNMENT_BYTES = 256


@dataclass(frozen=True, slots=True)
class StateLayout:
    """What a slot holds.

    Attributes:
        parts: of each layer with a state, the shape and dtype of each tensor on this rank.
        page_bytes: a slot is a multiple of it.
    """

    parts: tuple[tuple[tuple[tuple[int, ...], torch.dtype], ...], ...]
    page_bytes: int

    @classmethod
    def of(cls, specs: Sequence[State], num_ranks: int, page_bytes: int) -> StateLayout:
        """The layout of a rank; `specs` have the sizes of all ranks."""
        return cls(
            tuple(
                tuple(
                    ((shape[0] // num_ranks, *shape[1:]), getattr(torch, dtype))
                    for shape, dtype in spec.parts
                )
                for spec in specs
            ),
            page_bytes,
        )

    @property
    def slot_pages(self) -> int:
        """The pages that a slot takes the place of."""
        num_bytes = sum(_part_bytes(*part) for layer in self.parts for part in layer)
        return -(-num_bytes // self.page_bytes)

    @property
    def slot_bytes(self) -> int:
        return self.slot_pages * self.page_bytes


def _part_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return round_up(math.prod(shape) * dtype.itemsize, ALIGNMENT_BYTES)


class StatePool:
    """States of all layers in the arena of the KV pool.

    Args:
        arena: has room for the slots from `offset` on.
        slots: which there are, and the ids of their pages.

    Attributes:
        layers: of each layer with a state its tensors, [slots, *shape].
    """

    def __init__(self, arena: Arena, offset: int, layout: StateLayout, slots: StateSlots) -> None:
        self.slots = slots
        self._slots = flat = arena.view(offset, (slots.num_slots, layout.slot_bytes), torch.uint8)
        self.layers: list[tuple[torch.Tensor, ...]] = []
        start = 0
        for parts in layout.parts:
            tensors = []
            for shape, dtype in parts:
                end = start + math.prod(shape) * dtype.itemsize
                tensors.append(torch.unflatten(flat[:, start:end].view(dtype), 1, shape))
                start += _part_bytes(shape, dtype)
            self.layers.append(tuple(tensors))

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy slots to others, one pair after the other, behind what was launched before."""
        for source, target in pairs:
            self._slots[target].copy_(self._slots[source])
