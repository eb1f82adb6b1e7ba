"""Loads of adapters, as they are opened: with a stand-in for a device with streams."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ebbtide.formats.tensor_refs import TensorHeader
from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.io_struct import LoadLoRAAdapterFromTensorsReqInput
from ebbtide.srt.managers.scheduling.adapter_io import EngineAdapters
from ebbtide.srt.slices import finish
from ebbtide.srt.weight_sync.source import WeightSource


class Streams:
    """A device that knows where work is launched."""

    name = "cpu"
    current = "passes"

    def __init__(self) -> None:
        self.asked_on: list[str] = []

    @contextmanager
    def copying(self, *, beside: bool = False) -> Iterator[None]:
        self.current = "copies"
        try:
            yield
        finally:
            self.current = "passes"

    def copies_done(self) -> bool:
        return True


def opening(device: Any, tensors: dict[str, torch.Tensor], **fields: Any) -> Any:
    """Have these opened as an adapter; returns its plan."""

    def read() -> Iterator[tuple[str, torch.Tensor]]:
        for named in tensors.items():
            asked_on.append(device.current)
            yield named

    def opened(*_: object) -> Iterator[int]:
        yield 1
        return WeightSource([TensorHeader(name, (2, 2), torch.float32) for name in tensors], read)

    asked_on = device.asked_on
    slots: Any = SimpleNamespace(num_slots=2, fit=lambda *_: None)
    reader: Any = SimpleNamespace(open=opened)
    adapters = EngineAdapters(slots, reader, device, refuses_nonfinite=False)
    request = LoadLoRAAdapterFromTensorsReqInput(
        lora_name="a",
        config_dict={"peft_type": "LORA", "r": 2, "lora_alpha": 2},
        serialized_tensors="sent",
        **fields,
    )
    return finish(adapters.open(request, with_digest=not fields))


ONES = {name: torch.ones(2, 2) for name in "AB"}
SUM = hashlib.sha256(ONES["A"].numpy().tobytes()).hexdigest()


def test_a_digest_is_summed_up_where_the_senders_events_are_awaited() -> None:
    """They are where a tensor is asked for: sums on another stream might see what is not written yet."""
    device = Streams()
    assert opening(device, ONES).digest
    assert device.asked_on == ["copies", "copies"]


@pytest.mark.parametrize(
    ("expected", "named"),
    [
        ({"A": SUM, "B": "0" * 64}, "1 tensors differ: B"),
        ({"A": SUM}, "B"),
        ({"A": SUM, "B": SUM, "C": SUM}, "C"),
    ],
)
def test_tensors_that_are_not_those_that_the_sender_summed_up_are_refused(
    expected: dict[str, str], named: str
) -> None:
    device = Streams()
    opening(device, ONES, expected_checksums={"A": SUM, "B": SUM})
    assert device.asked_on == ["copies", "copies"]
    with pytest.raises(RequestRejected, match=f"expected_checksums: .*{named}$"):
        opening(device, ONES, expected_checksums=expected)
