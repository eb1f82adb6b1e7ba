"""What an arena needs of a machine: addresses that stay, and memory that comes and goes behind them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Reservation:
    """A range of virtual addresses that is ours until it is freed, with or without memory behind it."""

    address: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Handle:
    """Physical memory. `key` means something only to the VirtualMemory that created it."""

    key: int
    num_bytes: int


class VirtualMemory(Protocol):
    """Reserves addresses and maps physical memory under them.

    Every size and offset is a multiple of `granularity`. A handle is mapped at one place at a time, where
    nothing else is. Unmapping keeps its contents; releasing gives the memory back. Before memory is unmapped
    that a device may still be using, `drain` is called, once for however many handles.

    Attributes:
        keeps_for_free: whether unmapping a handle and keeping its contents needs no memory and no copy.
    """

    keeps_for_free: bool

    @property
    def granularity(self) -> int: ...
    def reserve(self, num_bytes: int) -> Reservation:
        """Take addresses, without memory. Raises OutOfDeviceMemory when the address space is exhausted."""

    def free_reservation(self, reservation: Reservation) -> None:
        """Give the addresses back. Nothing may be mapped there, and no tensor over them may be used again."""

    def create(self, num_bytes: int) -> Handle:
        """Take physical memory, contents undefined. Raises OutOfDeviceMemory and keeps nothing."""

    def map(self, at: Reservation, offset: int, handle: Handle) -> None:
        """Put the whole handle under `at.address + offset`."""

    def make_accessible(self, at: Reservation, offset: int, num_bytes: int) -> None:
        """Let a range be read and written, with handles mapped under all of it.

        Apart from `map` because on a device it costs the same for one handle as for many.
        """

    def drain(self) -> None:
        """Wait until nothing that was launched before can touch memory any more."""

    def unmap(self, at: Reservation, offset: int, num_bytes: int) -> None:
        """Take away the handles that fill `num_bytes` from `at.address + offset` on, with their contents.

        Raises OutOfDeviceMemory when keeping one needs more than there is: that and those behind it are then
        where they were. This cannot happen to handles that were released.
        """

    def release(self, handle: Handle) -> None:
        """Give up a handle: its memory goes back to the system now or, if it is mapped, at the unmap."""

    def as_tensor(self, reservation: Reservation) -> torch.Tensor:
        """A flat uint8 tensor over the whole reservation; only mapped parts may be read or written."""
