"""What an arena needs of a machine: addresses that stay, and memory that comes and goes behind them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

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

    Every size and offset is a multiple of `granularity`, else ValueError. A handle is mapped at one place at a
    time. Unmapping keeps its contents; releasing gives the memory back.
    """

    @property
    def granularity(self) -> int:
        """Bytes: the least size, and the alignment, of whatever is mapped."""
        ...

    def reserve(self, num_bytes: int) -> Reservation:
        """Take addresses, without memory. Raises OutOfDeviceMemory when the address space is exhausted."""
        ...

    def free_reservation(self, reservation: Reservation) -> None:
        """Give the addresses back. Nothing may be mapped there, and no tensor over them may be used again."""
        ...

    def create(self, num_bytes: int) -> Handle:
        """Take physical memory, contents undefined. Raises OutOfDeviceMemory and keeps nothing."""
        ...

    def release(self, handle: Handle) -> None:
        """Give the physical memory of an unmapped handle back to the operating system or the driver."""
        ...

    def map(self, at: Reservation, offset: int, handle: Handle) -> None:
        """Put the whole handle under `at.address + offset`, where nothing may be mapped."""
        ...

    def unmap(self, at: Reservation, offset: int, num_bytes: int) -> None:
        """Take the handle of `num_bytes` at `at.address + offset` away; its contents stay with it."""
        ...

    def as_tensor(self, reservation: Reservation) -> torch.Tensor:
        """A flat uint8 tensor over the whole reservation; only mapped parts may be read or written."""
        ...
