"""Slots of adapters, each of which is an integer."""

from __future__ import annotations

from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.control.adapter_loads import AdapterPlan
from ebbtide.srt.managers.control.ports import Slices
from ebbtide.srt.managers.io_struct import LoadLoRAAdapterReqInput, LoadRequest
from ebbtide.testing.null_runner import NullRunner
from ebbtide.testing.null_weights import NullCopies


class NullAdapters:
    """Adapters that are one integer; a load has it as its `lora_path`.

    Attributes:
        faults: what this rank fails with, once, at "open", "write", "save" or "restore".
        slowness: slices without bytes ahead of each that copies.
        num_restored, num_saved: copies from and to host memory.
    """

    def __init__(self, runner: NullRunner, num_slots: int) -> None:
        self.num_slots = num_slots
        self.runner = runner
        runner.adapters = [None] * num_slots
        self.faults: dict[str, Exception] = {}
        self.slowness = 0
        self.num_restored = self.num_saved = 0

    @property
    def copies(self) -> NullCopies:
        return NullCopies(self.runner)

    def fail_at(self, step: str) -> None:
        error = self.faults.pop(step, None)
        if error is not None:
            raise error

    def open(self, request: LoadRequest, *, with_digest: bool) -> Slices[AdapterPlan]:
        yield from ()
        self.fail_at("open")
        given = request.lora_path if isinstance(request, LoadLoRAAdapterReqInput) else ""
        if not given.isdigit():
            raise RequestRejected(f"lora_path: expected an integer, got {given!r}")
        return _NullPlan(self, int(given), given if with_digest else "")

    def write(self, slot: int, value: int) -> Slices[None]:
        """Nothing may read it from the first slice to the last."""
        self.runner.adapters[slot] = None
        for _ in range(self.slowness):
            yield 0
        self.fail_at("write")
        self.runner.adapters[slot] = value
        yield 1

    def save(self, slot: int) -> object:
        self.fail_at("save")
        self.num_saved += 1
        return self.runner.adapters[slot]

    def restore(self, slot: int, copy: object) -> None:
        self.fail_at("restore")
        self.num_restored += 1
        assert isinstance(copy, int)
        self.runner.adapters[slot] = copy


class _NullPlan:
    num_tensors, num_bytes = 2, 8

    def __init__(self, adapters: NullAdapters, value: int, digest: str) -> None:
        self.digest = digest
        self._adapters = adapters
        self._value = value

    def write(self, slot: int) -> Slices[None]:
        return self._adapters.write(slot, self._value)

    def detach(self) -> Slices[None]:
        yield 1

    def close(self) -> None:
        """Nobody's memory was borrowed."""
