"""Loads of adapters, as they are opened: with a stand-in for a device with streams."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from ebbtide.formats.tensor_refs import TensorHeader
from ebbtide.srt.managers.io_struct import LoadLoRAAdapterFromTensorsReqInput
from ebbtide.srt.managers.scheduling.adapter_io import EngineAdapters
from ebbtide.srt.slices import finish
from ebbtide.srt.weight_sync.source import WeightSource


class Streams:
    """A device that knows where work is launched."""

    name = "cpu"
    current = "passes"

    @contextmanager
    def copying(self, *, beside: bool = False) -> Iterator[None]:
        self.current = "copies"
        try:
            yield
        finally:
            self.current = "passes"

    def copies_done(self) -> bool:
        return True


def test_a_digest_is_summed_up_where_the_senders_events_are_awaited() -> None:
    """They are where a tensor is asked for: sums on another stream might see what is not written yet."""
    device: Any = Streams()
    asked_on = []

    def read() -> Iterator[tuple[str, torch.Tensor]]:
        for name in "AB":
            asked_on.append(device.current)
            yield name, torch.ones(2, 2)

    def opened(*_: object) -> Iterator[int]:
        yield 1
        return WeightSource([TensorHeader(name, (2, 2), torch.float32) for name in "AB"], read)

    slots: Any = SimpleNamespace(num_slots=2, fit=lambda *_: None)
    reader: Any = SimpleNamespace(open=opened)
    adapters = EngineAdapters(slots, reader, device, refuses_nonfinite=False)
    request = LoadLoRAAdapterFromTensorsReqInput(
        lora_name="a", config_dict={"peft_type": "LORA", "r": 2, "lora_alpha": 2}, serialized_tensors="sent"
    )

    assert finish(adapters.open(request, with_digest=True)).digest
    assert asked_on == ["copies", "copies"]
