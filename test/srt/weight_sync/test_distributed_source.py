"""Groups that a trainer in another process makes, and the tensors that it broadcasts in them."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fixtures.broadcasting_trainer import BroadcastingTrainer, announcement
from fixtures.deadlines import HANG_S, wait_until
from fixtures.servers import free_port
from safetensors.torch import load_file, save_file

from ebbtide.formats import packed_slices, weight_group
from ebbtide.formats.rendezvous import GroupAddress, Member
from ebbtide.srt.config import Place
from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.model_executor.weight_copies import Destination
from ebbtide.srt.weight_sync import distributed_source
from ebbtide.srt.weight_sync.distributed_source import (
    Announcement,
    BroadcastSource,
    Memberships,
    open_broadcast,
)

ALL = 60.0


@pytest.fixture(scope="module")
def shared_trainer() -> Iterator[BroadcastingTrainer]:
    with BroadcastingTrainer() as process:
        yield process


@pytest.fixture
def trainer(shared_trainer: BroadcastingTrainer) -> Iterator[BroadcastingTrainer]:
    """One that tests leave as it was: heard to the end of what it was told."""
    yield shared_trainer
    shared_trainer.leave()


@pytest.fixture
def mortal_trainer() -> Iterator[BroadcastingTrainer]:
    with BroadcastingTrainer() as process:
        yield process


@pytest.fixture
def groups() -> Memberships:
    return Memberships(torch.device("cpu"))


@pytest.fixture
def tensors(tmp_path: Path) -> Path:
    """Dtypes of every size, none of them aligned in a bucket behind the first; a scalar."""
    generator = torch.Generator().manual_seed(0)
    file = tmp_path / "tensors.safetensors"
    save_file(
        {
            "bytes": torch.arange(5, dtype=torch.uint8),
            "eights": torch.randn(9, generator=generator).to(torch.float8_e4m3fn),
            "floats": torch.randn(3, 5, generator=generator),
            "halves": torch.randn(7, generator=generator).to(torch.bfloat16),
            "many": torch.randn(300, 1000, generator=generator),
            "scalar": torch.tensor(2.5),
        },
        file,
    )
    return file


def address(fields: dict[str, Any]) -> GroupAddress:
    return GroupAddress(
        name=fields["group_name"],
        host=fields["master_address"],
        port=fields["master_port"],
        rank=fields["rank_offset"],
        world_size=fields["world_size"],
        backend=fields["backend"],
    )


def have_joined(joining: Iterator[int]) -> None:
    wait_until(lambda: next(joining, None) is None)


def join(groups: Memberships, trainer: BroadcastingTrainer, name: str = "g") -> None:
    """Join a group of two."""
    have_joined(groups.join(address(trainer.join(name)), ALL))
    trainer.hear()


def source_of(
    groups: Memberships,
    file: Path,
    load_format: str | None = None,
    timeout_s: float = ALL,
    packed_buffer_bytes: int = 1 << 30,
) -> BroadcastSource:
    announced = Announcement(
        **announcement(file), load_format=load_format, packed_buffer_bytes=packed_buffer_bytes
    )
    source = open_broadcast(announced, groups.get("g"), timeout_s)
    assert isinstance(source, BroadcastSource)
    return source


def assert_holds(source: BroadcastSource, file: Path) -> None:
    wait_until(source.arrived)
    expected = load_file(file)
    received = {name: tensor.clone() for name, tensor in source}
    assert list(received) == list(expected) == [entry.name for entry in source.entries]
    for name, tensor in expected.items():
        assert received[name].dtype == tensor.dtype
        assert torch.equal(received[name], tensor), name
    source.close()


def test_what_a_trainer_broadcasts_arrives_again_and_again(
    trainer: BroadcastingTrainer, groups: Memberships, tensors: Path
) -> None:
    join(groups, trainer)
    for command, load_format in (("plain", None), ("async", None), ("bucket", "flattened_bucket")):
        source = source_of(groups, tensors, load_format)
        trainer.tell(command, "g", tensors)
        assert_holds(source, tensors)
        trainer.hear()
    assert groups.names == ["g"]


def test_packed_broadcasts_are_cut_as_vllms_trainers_cut_them(
    trainer: BroadcastingTrainer, groups: Memberships, tensors: Path
) -> None:
    join(groups, trainer)
    expected = load_file(tensors)
    sizes = [tensor.nbytes for tensor in expected.values()]
    assert sizes == [60, 1_200_000, 4, 14, 9, 5]
    # A chunk ends with the tensor by which it exceeds the buffer: as long as the buffer it goes on.
    for buffer_bytes, num_broadcasts in ((1 << 30, 1), (4, 5), (59, 3), (60, 2)):
        assert len(packed_slices(sizes, buffer_bytes)) == num_broadcasts
        for is_kept in (True, False):
            source = source_of(groups, tensors, "packed", packed_buffer_bytes=buffer_bytes)
            rooms = {name: torch.empty_like(tensor) for name, tensor in expected.items()}
            places = [Destination(rooms[entry.name], None) for entry in source.entries]
            in_place = not is_kept and source.can_receive_in_place(torch.device("cpu"))
            if in_place:
                source.receive_in_place(lambda places=places: places)
            trainer.tell("packed", "g", tensors, buffer_bytes)
            wait_until(source.arrived)
            if not in_place:
                rooms = {name: tensor.clone() for name, tensor in source if isinstance(tensor, torch.Tensor)}
            trainer.hear()
            assert all(torch.equal(rooms[name], tensor) for name, tensor in expected.items())
            source.close()


def three_ranks(trainer: BroadcastingTrainer) -> list[Memberships]:
    """Three ranks of an engine that have joined group "g"."""
    places = [Place(tp_rank=rank, tp_size=3) for rank in range(3)]
    ranks = [Memberships(torch.device("cpu"), place) for place in places]
    fields = trainer.join("g", world_size=4)
    all_joining = [
        groups.join(replace(address(fields), rank=1 + rank), ALL) for rank, groups in enumerate(ranks)
    ]
    for joining in all_joining:
        have_joined(joining)
    trainer.hear()
    return ranks


def test_no_rank_stays_where_the_trainer_or_one_of_them_is_gone(
    mortal_trainer: BroadcastingTrainer, tensors: Path
) -> None:
    ranks = three_ranks(mortal_trainer)
    sources = [source_of(groups, tensors) for groups in ranks]
    assert not any(source.arrived() for source in sources)
    mortal_trainer.tell("half", "g", tensors)
    mortal_trainer.kill()
    refusals: dict[int, str] = {}

    def all_have_failed() -> bool:
        for rank, source in enumerate(sources):
            if rank not in refusals:
                try:
                    assert not source.arrived()
                except RequestRejected as refusal:
                    refusals[rank] = refusal.message
        return len(refusals) == len(sources)

    # Ranks pass broadcasts on: that one has left reaches those behind it.
    wait_until(all_have_failed)
    assert all(
        "nothing of the update is served: the group 'g' was left" in message for message in refusals.values()
    )
    assert [groups.names for groups in ranks] == [[], [], []]


def test_a_group_counts_as_left_though_a_peer_does_not_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_group, "LEAVE_S", 0.1)
    never = threading.Event()

    def hang() -> None:
        never.wait()

    leaving = weight_group.Leaving("g", hang)
    assert not leaving.is_done
    wait_until(lambda: leaving.is_done)
    never.set()


def test_a_group_of_the_same_name_replaces_the_first(
    trainer: BroadcastingTrainer, groups: Memberships, tensors: Path
) -> None:
    join(groups, trainer)
    late = source_of(groups, tensors)
    trainer.tell("leave", "g")
    trainer.hear()
    join(groups, trainer)
    with pytest.raises(RequestRejected, match="another group of that name"):
        wait_until(late.arrived)
    trainer.tell("plain", "g", tensors)
    assert_holds(source_of(groups, tensors), tensors)
    trainer.hear()


def test_a_group_whose_trainer_has_ended_is_left_when_another_is_joined(
    trainer: BroadcastingTrainer, mortal_trainer: BroadcastingTrainer, groups: Memberships, tensors: Path
) -> None:
    join(groups, trainer, "g")
    join(groups, mortal_trainer, "abandoned")
    mortal_trainer.kill()
    assert groups.names == ["abandoned", "g"]
    left = groups.leave("g", "not needed")
    assert left is not None
    wait_until(lambda: left.is_done)
    with pytest.raises(RequestRejected, match=r"no group 'g'.*not needed.*known: 'abandoned'") as refusal:
        groups.get("g")
    assert refusal.value.status == 400
    trainer.tell("leave", "g")
    trainer.hear()
    join(groups, trainer, "g")
    wait_until(lambda: groups.names == ["g"])
    with pytest.raises(RequestRejected, match=r"no group 'abandoned'.*store that its trainer kept is gone"):
        groups.get("abandoned")
    trainer.tell("plain", "g", tensors)
    assert_holds(source_of(groups, tensors), tensors)
    trainer.hear()


def test_an_update_that_is_given_up_leaves_its_group_once_it_has_begun(
    trainer: BroadcastingTrainer, groups: Memberships, tensors: Path
) -> None:
    join(groups, trainer)
    source_of(groups, tensors).close()
    assert groups.names == ["g"]
    source = source_of(groups, tensors)
    assert source.arrived() is False
    source.close()
    assert groups.names == []
    with pytest.raises(RequestRejected, match="before all of its broadcasts had arrived"):
        groups.get("g")


def test_nobody_at_the_address(groups: Memberships, mortal_trainer: BroadcastingTrainer) -> None:
    fields = mortal_trainer.join("elsewhere", world_size=3)  # One more than will come.
    joining = groups.join(address({**fields, "group_name": "g"}), 1.0)
    with pytest.raises(RequestRejected, match="was not joined as rank 1 of 3 within 1 s") as refusal:
        have_joined(joining)
    assert refusal.value.status == 400
    assert groups.names == []


def test_one_joining_at_a_time_under_a_name(groups: Memberships) -> None:
    # Nobody listens there: it goes on joining for as long as it may.
    fields = {"host": "127.0.0.1", "port": free_port(), "rank": 1, "world_size": 3, "backend": "gloo"}
    address = GroupAddress("g", **fields)  # type: ignore[arg-type]
    first = groups.join(address, ALL)
    with pytest.raises(RequestRejected, match="just being joined") as refusal:
        groups.join(address, ALL)
    assert refusal.value.status == 409
    assert groups.leave("g", "destroyed") is not None
    with pytest.raises(RequestRejected, match="was not joined: destroyed"):
        next(first)
    assert groups.leave("g", "destroyed") is None


@pytest.mark.parametrize("is_joined_first", [True, False])
@pytest.mark.parametrize("is_destroyed", [True, False])
def test_a_group_whose_joining_is_given_up_is_left_whenever_it_was_joined(
    groups: Memberships, monkeypatch: pytest.MonkeyPatch, is_joined_first: bool, is_destroyed: bool
) -> None:
    left, others_are_there = threading.Event(), threading.Event()

    def meet(*place: Any) -> Member:
        others_are_there.wait()
        return Member(SimpleNamespace(abort=left.set), None)

    monkeypatch.setattr(distributed_source, "connect", meet)
    joining = groups.join(GroupAddress("given-up", "::1", 1, 1, 2, "gloo"), ALL)
    next(joining)
    if is_joined_first:
        others_are_there.set()
        wait_until(lambda: not any(thread.name == "join-given-up" for thread in threading.enumerate()))
    if is_destroyed:
        groups.leave("given-up", "destroyed")
    else:
        joining.close()
    others_are_there.set()
    assert left.wait(HANG_S)
    assert groups.names == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"host": ""}, "master_address"),
        ({"port": 0}, "master_port: expected 1..65535, got 0"),
        ({"world_size": 1}, "rank_offset"),
        ({"backend": "nccl"}, "this engine runs on the CPU"),
    ],
)
def test_an_address_that_cannot_be(groups: Memberships, changes: dict[str, Any], message: str) -> None:
    fields = {"name": "g", "host": "::1", "port": 1, "rank": 1, "world_size": 2, "backend": "gloo", **changes}
    with pytest.raises(RequestRejected, match=message) as refusal:
        groups.join(GroupAddress(**fields), ALL)
    assert refusal.value.status == 400


@pytest.mark.parametrize("rank_offset", [0, 2, 4])
def test_a_group_without_room_for_all_ranks_is_refused_by_each_of_them(rank_offset: int) -> None:
    for rank in range(4):
        place = Place(tp_size=2, dp_size=2, tp_rank=rank % 2, dp_rank=rank // 2)
        groups = Memberships(torch.device("cpu"), place)
        with pytest.raises(RequestRejected, match=rf"expected 1\.\.1 .* has 4, .*, got {rank_offset}"):
            groups.join(GroupAddress("g", "::1", 1, rank_offset + place.rank, 5, "gloo"), ALL)


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_addresses_of_either_version(host: str) -> None:
    assert GroupAddress("g", host, 80, 1, 2, "gloo").url == "tcp://[::1]:80"
    assert GroupAddress("g", "localhost", 80, 1, 2, "gloo").url == "tcp://localhost:80"


def test_an_announcement_that_cannot_be(groups: Memberships, trainer: BroadcastingTrainer) -> None:
    join(groups, trainer)
    for changes, message in (
        ({"names": ["a", "b"]}, "got 2, 1 and 1"),
        ({"dtypes": ["float33"]}, "dtypes: a: dtype: expected one of .*, got 'float33'"),
        ({"shapes": [[2, -1]]}, "shapes: a: expected an integer from 0"),
        ({"load_format": "sparse"}, "num_updates: expected one per tensor"),
        ({"load_format": "sparse", "num_updates": [7]}, "a: 7 positions of a tensor of 6 elements"),
        ({"load_format": "direct"}, "load_format: unknown value 'direct'; valid: null, flattened_bucket"),
    ):
        fields: Any = {"names": ["a"], "dtypes": ["torch.float32"], "shapes": [[2, 3]], **changes}
        with pytest.raises(RequestRejected, match=message):
            open_broadcast(Announcement(**fields), groups.get("g"), ALL)
    assert groups.names == ["g"]
