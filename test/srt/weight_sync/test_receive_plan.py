"""Broadcast tensors that are received where they belong, or beside it: the same bytes, in little memory."""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.broadcasting_trainer import BroadcastingTrainer
from fixtures.deadlines import HANG_S, wait_until
from safetensors.torch import save_file
from torch import Tensor

from ebbtide.formats import weight_group
from ebbtide.formats.rendezvous import GroupAddress, connect
from ebbtide.formats.weight_group import Broadcasts, Transfer, WeightGroup
from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.model_executor.weight_copies import Destination
from ebbtide.srt.models.sharding import Part
from ebbtide.srt.weight_sync import distributed_source as plans
from ebbtide.srt.weight_sync.distributed_source import receive_plan

CPU = torch.device("cpu")


def layout_of(tensors: Sequence[Tensor]) -> list[tuple[tuple[int, ...], torch.dtype]]:
    return [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]


def arranged(
    tensors: Sequence[Tensor], destinations: Sequence[Destination | None], num_apart: int = 0
) -> list[Transfer]:
    return list(receive_plan(layout_of(tensors), destinations, CPU, num_apart=num_apart))


def receive_into(
    group: WeightGroup, destinations: Sequence[Destination | None], tensors: Sequence[Tensor], limit_s: float
) -> Broadcasts:
    layout = layout_of(tensors)
    return group.receive_by(lambda count: receive_plan(layout, destinations, CPU, num_apart=count), limit_s)


def whole(region: Tensor) -> Destination:
    return Destination(region, None)


# ------------------------------------------------------------------------------------ where it is received


@pytest.mark.parametrize(
    ("destination", "is_in_place"),
    [
        (whole(torch.zeros(6, 4)), True),
        (whole(torch.zeros(9, 4).narrow(0, 3, 6)), True),  # rows of a fused parameter
        (whole(torch.zeros(6, 9).narrow(1, 3, 4)), False),
        (whole(torch.zeros(6, 4, dtype=torch.float64)), False),
        (Destination(torch.zeros(3, 4), Part(0, ((3, 3),), is_first=True)), False),
        (Destination(torch.zeros(6, 2), Part(1, ((2, 2),), is_first=True)), False),
        (None, False),
    ],
)
def test_only_what_fits_as_it_is_goes_straight_where_it_belongs(
    destination: Destination | None, is_in_place: bool
) -> None:
    tensor = torch.ones(6, 4)
    (transfer,) = arranged([tensor], [destination])
    assert transfer.is_in_place is is_in_place
    assert layout_of([transfer.tensor]) == layout_of([tensor])
    if is_in_place:
        assert destination is not None
        assert transfer.tensor.data_ptr() == destination.region.data_ptr()
        assert [one.is_in_place for one in arranged([tensor] * 2, [destination] * 2, 1)] == [False, True]


@pytest.mark.parametrize("sizes", [[100] * 50, [1000, 10, 990, 2500, 10, 2500], [5000], [0, 3, 0], []])
def test_memory_beside_is_used_again_but_never_of_two_rounds_that_follow_each_other(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int]
) -> None:
    monkeypatch.setattr(plans, "IN_FLIGHT_BYTES", 4096)
    tensors = [torch.ones(size, dtype=torch.uint8) for size in sizes]
    transfers = arranged(tensors, [None] * len(tensors))
    ranges = [
        (transfer.tensor.data_ptr(), transfer.tensor.data_ptr() + transfer.tensor.nbytes, transfer.round)
        for transfer in transfers
        if transfer.tensor.nbytes
    ]
    for index, (start, end, turn) in enumerate(ranges):
        for other_start, other_end, other_turn in ranges[:index]:
            assert turn >= other_turn
            if turn - other_turn < 2:
                assert end <= other_start or other_end <= start
    storages = {
        transfer.tensor.untyped_storage().data_ptr(): transfer.tensor.untyped_storage().nbytes()
        for transfer in transfers
    }
    assert len(storages) <= 2
    largest = max(sizes, default=0) + plans.ALIGNMENT_BYTES
    assert sum(storages.values()) <= max(4096, 2 * largest)


# --------------------------------------------------------------------------------------- over a real group


@pytest.fixture
def trainer() -> Iterator[BroadcastingTrainer]:
    with BroadcastingTrainer() as process:
        yield process


@pytest.fixture
def group(trainer: BroadcastingTrainer) -> Iterator[WeightGroup]:
    fields: dict[str, Any] = trainer.join("g")
    address = GroupAddress("g", fields["master_address"], fields["master_port"], 1, 2, "gloo")
    member = connect(address, HANG_S)
    trainer.hear()
    group = WeightGroup("g", member, CPU)
    del member
    yield group
    group.close("the test is over")


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {f"t{index:02}": torch.randn(40, 30, generator=generator) for index in range(12)}


@pytest.fixture
def file(tensors: dict[str, Tensor], tmp_path: Path) -> Path:
    path = tmp_path / "tensors.safetensors"
    save_file(tensors, path)
    return path


def test_parts_fused_rows_and_other_types_arrive_through_little_memory(
    monkeypatch: pytest.MonkeyPatch,
    trainer: BroadcastingTrainer,
    group: WeightGroup,
    tensors: dict[str, Tensor],
    file: Path,
) -> None:
    monkeypatch.setattr(plans, "IN_FLIGHT_BYTES", 10_000)  # Two of them at a time.
    sent = list(tensors.values())
    fused = torch.zeros(80, 30)
    regions = [fused[:40], fused[40:], *(torch.zeros(40, 30) for _ in range(6))]
    destinations: list[Destination | None] = [whole(region) for region in regions]
    destinations += [
        None,
        Destination(torch.zeros(10, 30), Part(0, ((20, 10),), is_first=True)),
        Destination(torch.zeros(40, 15), Part(1, ((15, 15),), is_first=True)),
        whole(torch.zeros(40, 30, dtype=torch.bfloat16)),
    ]
    for max_under_way in (1, 3, 100):
        monkeypatch.setattr(weight_group, "MAX_UNDER_WAY", max_under_way)
        for destination in destinations:
            if destination is not None:
                destination.region.zero_()
        broadcasts = receive_into(group, destinations, sent, HANG_S)
        trainer.tell("plain", "g", file)
        wait_until(lambda broadcasts=broadcasts: broadcasts.is_done)
        assert broadcasts.result() == []
        trainer.hear()
        expected = [*sent[:8], None, sent[9][20:30], sent[10][:, 15:], sent[11].to(torch.bfloat16)]
        for destination, tensor in zip(destinations, expected, strict=True):
            assert (destination is None) == (tensor is None)
            if destination is not None and tensor is not None:
                assert torch.equal(destination.region, tensor)


def test_nothing_is_written_once_the_group_was_left(
    trainer: BroadcastingTrainer, group: WeightGroup, tensors: dict[str, Tensor], file: Path
) -> None:
    """By a trainer that was stopped and goes on."""
    sent = list(tensors.values())
    regions = [torch.zeros(40, 30) for _ in sent]
    broadcasts = receive_into(group, [whole(region) for region in regions], sent, HANG_S)
    trainer.tell("half", "g", file)
    trainer.hear()
    wait_until(lambda: torch.equal(regions[5], sent[5]))
    trainer.freeze()
    group.close("the update is given up")
    assert broadcasts.ends()
    at_the_end = [region.clone() for region in regions]
    assert not torch.equal(regions[6], sent[6])
    os.kill(trainer._process.pid, signal.SIGCONT)
    trainer.tell("half", "g", file)
    wait_until(lambda: broadcasts.is_done)
    with pytest.raises(RequestRejected, match=r"the group 'g' was left .*the update is given up"):
        broadcasts.result()
    time.sleep(0.5)
    assert all(torch.equal(region, before) for region, before in zip(regions, at_the_end, strict=True))


def test_broadcasts_that_do_not_come_end_by_themselves(
    trainer: BroadcastingTrainer, group: WeightGroup
) -> None:
    region = torch.zeros(3)
    broadcasts = receive_into(group, [whole(region)], [region], 0.5)
    trainer.freeze()
    wait_until(lambda: broadcasts.is_done)
    with pytest.raises(RequestRejected, match="the group 'g' was left"):
        broadcasts.result()
    assert group.is_closed
