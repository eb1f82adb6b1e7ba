"""The weights of an engine in buckets, for another one like it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ebbtide.ray import joint_engine
from ebbtide.ray.joint_engine import JointEngine, WeightBucket
from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.io_struct import WeightPiece

PARAMETERS = {
    "embedding": torch.arange(10.0),
    "projection": torch.arange(6.0).to(torch.float8_e4m3fn).view(2, 3),
    "projection_scale": torch.ones(1),
    "norm": torch.arange(3).to(torch.bfloat16),
}


class Engine(JointEngine):
    """Has two ranks, each with these parameters, and notes what it is told."""

    def __init__(self) -> None:
        self.server_args: Any = SimpleNamespace(tp_size=2)
        self.generation = 0
        self.told: list[Any] = []

    async def _read(self, index: int, first_byte: int) -> list[WeightPiece]:
        name, tensor = list(PARAMETERS.items())[index]
        data = tensor.view(-1).view(torch.uint8).numpy().tobytes()
        piece = WeightPiece(
            num_parameters=len(PARAMETERS),
            generation=self.generation,
            name=name,
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            data=data[first_byte : first_byte + joint_engine.PIECE_BYTES],
        )
        return [piece, piece]

    async def _stage(self, bucket: WeightBucket) -> None:
        self.told.append([[parameter.name for parameter in rank] for rank in bucket.by_rank])
        for parameter in bucket.by_rank[1]:
            expected = PARAMETERS[parameter.name]
            assert torch.equal(parameter.tensor().view(torch.uint8), expected.view(torch.uint8))

    async def async_begin_weight_update(self, *args: Any, **kwargs: Any) -> Any:
        self.told.append("begin")

    async def async_end_weight_update(self, *args: Any, **kwargs: Any) -> Any:
        self.told.append(kwargs["weight_version"])

    async def async_abort_weight_update(self) -> Any:
        self.told.append("abort")


def test_weights_travel_in_buckets_and_8_bits_with_their_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint_engine, "PIECE_BYTES", 16)
    monkeypatch.setattr(joint_engine, "BUCKET_BYTES", 1)
    giver, taker = Engine(), Engine()
    asyncio.run(taker.take_weights(giver.read_weights, "7"))
    names = [["embedding"], ["projection", "projection_scale"], ["norm"]]
    assert taker.told == ["begin", *([one, one] for one in names), "7"]


def test_weights_that_change_meanwhile_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint_engine, "BUCKET_BYTES", 1)
    giver, taker = Engine(), Engine()

    async def read(index: int) -> WeightBucket:
        giver.generation += 1
        return await giver.read_weights(index)

    with pytest.raises(RequestRejected, match="changed while they were read"):
        asyncio.run(taker.take_weights(read, "7"))
    assert taker.told[-1] == "abort"
