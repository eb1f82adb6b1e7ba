"""What the machine itself allows: rates measured before an engine is there."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

GB = 1e9
GIB = 1 << 30


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def empty_cache(device: str) -> None:
    if device == "cuda":
        torch.cuda.empty_cache()


@dataclass
class Machine:
    """Rates measured in this process, before an engine is there. All runs; what counts is the best.

    Attributes:
        copy_bytes_per_s: device to device, bytes read and written.
        flops: bfloat16 matrix product of random numbers, operations per second.
        to_host_bytes_per_s, to_device_bytes_per_s: pinned memory.
    """

    runs: dict[str, list[float]] = field(default_factory=dict)

    @classmethod
    def measure(cls, device: str, *, tiny: bool = False) -> Machine:
        machine = cls()
        num_bytes, size = (1 << 20, 128) if tiny else (4 * GIB, 8192)
        machine._measure_copies(device, num_bytes)
        machine._measure_product(device, size)
        empty_cache(device)
        return machine

    def _measure_copies(self, device: str, num_bytes: int) -> None:
        source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
        target = torch.zeros_like(source)
        self._note("copy", device, 2 * num_bytes, lambda: target.copy_(source))
        host = torch.ones(min(num_bytes, GIB), dtype=torch.uint8, pin_memory=device == "cuda")
        part = source[: len(host)]
        self._note("to_host", device, len(host), lambda: host.copy_(part, non_blocking=True))
        self._note("to_device", device, len(host), lambda: part.copy_(host, non_blocking=True))

    def _measure_product(self, device: str, size: int) -> None:
        left, right = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
        product = torch.empty_like(left)
        self._note("matmul", device, 2 * size**3, lambda: torch.mm(left, right, out=product))

    def measure_sustained(self, device: str, *, tiny: bool = False) -> None:
        """The matrix product again and again, a rate for each half second: power limits lower the clocks."""
        size, num_windows, window_s = (128, 1, 0.01) if tiny else (8192, 8, 0.5)
        left, right = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
        product = torch.empty_like(left)
        for _ in range(num_windows):
            synchronize(device)
            started, num_products = time.perf_counter(), 0
            while time.perf_counter() - started < window_s:
                for _ in range(20):
                    torch.mm(left, right, out=product)
                num_products += 20
                synchronize(device)
            rate = num_products * 2 * size**3 / (time.perf_counter() - started)
            self.runs.setdefault("matmul_sustained", []).append(rate)
        del left, right, product
        empty_cache(device)

    def _note(self, name: str, device: str, amount: float, action: Callable[[], object]) -> None:
        repeats = 5 if device == "cuda" else 1
        action()
        for _ in range(5):
            synchronize(device)
            started = time.perf_counter()
            for _ in range(repeats):
                action()
            synchronize(device)
            rate = repeats * amount / (time.perf_counter() - started)
            self.runs.setdefault(name, []).append(rate)

    @property
    def copy_bytes_per_s(self) -> float:
        return max(self.runs["copy"])

    @property
    def flops(self) -> float:
        return max(self.runs["matmul"])

    @property
    def to_host_bytes_per_s(self) -> float:
        return max(self.runs["to_host"])

    @property
    def to_device_bytes_per_s(self) -> float:
        return max(self.runs["to_device"])
