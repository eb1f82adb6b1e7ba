"""Faults at each step of an update of real weights: the old serve bit for bit, the next update works."""

import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from fixtures.checkpoints import checksum_of, make_checkpoint
from fixtures.eight_bits import SHAPE, in_eight_bits
from fixtures.real_rank import RealRank
from msgspec import structs
from safetensors.torch import load_file

from ebbtide.formats.tensor_refs import TensorHeader
from ebbtide.srt.device import CpuDevice
from ebbtide.srt.errors import OutOfDeviceMemory
from ebbtide.srt.managers.io_struct import (
    AbortWeightUpdateReqInput,
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    PauseMode,
    Refusal,
    ReleaseMemoryOccupationReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromTensorReqInput,
    UpdateWeightsReqOutput,
)
from ebbtide.srt.managers.scheduler_process import describe_staging
from ebbtide.srt.managers.scheduling import weight_io
from ebbtide.srt.memory_saver.arena import Arena
from ebbtide.srt.model_executor.weight_copies import Destination
from ebbtide.srt.weight_sync.disk_source import open_folder
from ebbtide.srt.weight_sync.distributed_source import BroadcastSource


class Fault(Exception):
    """What the tests inject."""


@pytest.fixture
def rank(checkpoints: tuple[Path, Path]) -> Iterator[RealRank]:
    rank = RealRank(checkpoints[0])
    yield rank
    rank.store.arena.close()


def fail_after(patch: pytest.MonkeyPatch, owner: Any, name: str, count: int) -> None:
    """Let so many calls of a method pass, and no more."""
    function, calls = getattr(owner, name), 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > count:
            raise Fault(f"call {calls} of {name}")
        return function(*args, **kwargs)

    patch.setattr(owner, name, call)


def failing_iterator(*args: Any) -> Iterator[int]:
    yield 0
    raise Fault("half-way through the rest")


# What is broken, and how: the steps of an update in their order.
FAULTS: dict[str, Callable[[pytest.MonkeyPatch, RealRank], None]] = {
    "finding room": lambda patch, rank: fail_after(patch, rank.store.arena, "stage", 0),
    "first write": lambda patch, rank: fail_after(patch, rank.store, "write_by_slices", 0),
    "a later write": lambda patch, rank: fail_after(patch, rank.store, "write_by_slices", 7),
    "completing": lambda patch, rank: patch.setattr(rank.store, "complete", failing_iterator),
    "swapping": lambda patch, rank: fail_after(patch, rank.store.arena, "swap", 0),
    "making a view": lambda patch, rank: fail_after(patch, Arena, "view", 3),
}


@pytest.mark.parametrize(
    ("fault", "in_session"),
    [*((name, False) for name in FAULTS), ("a later write", True), ("swapping", True)],
)
def test_a_fault_at_any_step_leaves_the_old_weights(
    rank: RealRank,
    checkpoints: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    in_session: bool,
) -> None:
    all_but_one = dict(list(load_file(checkpoints[1] / "model.safetensors").items())[1:])
    update = UpdateWeightsFromTensorReqInput(
        serialized_named_tensors=[safetensors.torch.save(all_but_one)],
        load_format="safetensors",
        weight_version="b",
    )
    before = checksum_of(rank.store)
    if in_session:
        assert rank.apply(BeginWeightUpdateReqInput()).success
    with monkeypatch.context() as patch:
        FAULTS[fault](patch, rank)
        reply = rank.apply(update)
        if in_session and reply.success:
            reply = rank.apply(EndWeightUpdateReqInput())
    assert isinstance(reply, Refusal)
    assert reply.status == 400
    assert "old weights serve: Fault" in reply.message
    assert checksum_of(rank.store) == before
    assert rank.scheduler.control.allows_forward
    assert rank.scheduler.control.updates.version == "default"

    again = rank.apply(update)
    if in_session:
        assert checksum_of(rank.store) == before
        again = rank.apply(EndWeightUpdateReqInput())
    assert isinstance(again, UpdateWeightsReqOutput)
    assert (again.weight_version, again.content) == ("b", "valid")
    assert checksum_of(rank.store) != before


@pytest.mark.parametrize("load_format", ["safetensors", "pt"])
def test_a_file_that_is_cut_short_while_it_is_written_leaves_the_old_weights(
    rank: RealRank,
    checkpoints: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    load_format: str,
) -> None:
    folder = Path(shutil.copytree(checkpoints[1], tmp_path / "copy"))
    file = folder / "model.safetensors"
    if load_format == "pt":
        torch.save(load_file(file), folder / "model.bin")
        file.unlink()
        file = folder / "model.bin"
    before, write = checksum_of(rank.store), rank.store.write_by_slices
    num_written = 0

    def write_and_cut(*args: Any) -> Iterator[int]:
        nonlocal num_written
        num_written += 1
        if num_written == 4:
            os.truncate(file, file.stat().st_size // 4)
        return write(*args)

    monkeypatch.setattr(rank.store, "write_by_slices", write_and_cut)
    reply = rank.apply(UpdateWeightFromDiskReqInput(model_path=str(folder), load_format=load_format))
    assert isinstance(reply, Refusal)
    assert reply.status == 400
    assert f"{file} was cut short" in reply.message
    assert num_written >= 4
    assert checksum_of(rank.store) == before
    assert rank.scheduler.control.allows_forward


@pytest.mark.parametrize("rule", ["auto", "always", "never"])
@pytest.mark.parametrize("has_room", [True, False])
def test_a_second_copy_is_made_as_update_staging_says(
    checkpoints: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, rule: str, has_room: bool
) -> None:
    rank = RealRank(checkpoints[0], update_staging=rule)
    told = describe_staging(rule, rank.runner)
    assert ("second copy" in told, "refused" in told) == (rule != "never", rule == "always")
    before = checksum_of(rank.store)
    if not has_room:
        monkeypatch.setattr(rank.store.arena, "stage", no_room)
    reply = rank.apply(UpdateWeightFromDiskReqInput(model_path=str(checkpoints[1])))
    if rule == "always" and not has_room:
        assert isinstance(reply, Refusal)
        assert (reply.status, reply.fields) == (409, {"needed_bytes": 2, "free_bytes": 1})
        assert checksum_of(rank.store) == before
    else:
        assert reply.staged is (has_room and rule != "never")
        assert checksum_of(rank.store) != before
    rank.store.arena.close()


def test_nan_and_inf_are_named(rank: RealRank, checkpoints: tuple[Path, Path]) -> None:
    tensors = load_file(checkpoints[1] / "model.safetensors")
    for name, value in (("model.norm.weight", math.inf), ("model.layers.0.mlp.up_proj.weight", math.nan)):
        tensors[name].view(-1)[-1] = value
    update = UpdateWeightsFromTensorReqInput(
        serialized_named_tensors=[safetensors.torch.save(tensors)], load_format="safetensors"
    )
    before = checksum_of(rank.store)
    refusal = rank.apply(structs.replace(update, refuse_nonfinite=True))
    assert (refusal.status, refusal.fields["num_nonfinite"], checksum_of(rank.store)) == (400, 2, before)
    reply = rank.apply(update)
    assert reply.num_nonfinite == 2
    assert "hold NaN or Inf: model.layers.0.mlp.up_proj.weight, model.norm.weight." in reply.message
    assert rank.apply(UpdateWeightFromDiskReqInput(model_path=str(checkpoints[0]))).num_nonfinite == 0


@pytest.mark.parametrize("staging", ["always", "never"])
@pytest.mark.parametrize("quantization", ["fp8", "w8a8_fp8"])
def test_nan_that_comes_in_8_bits_is_named(quantization: str, staging: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "Qwen3ForCausalLM", **SHAPE)
    rank = RealRank(folder, quantization=quantization, update_staging=staging)
    tensors = in_eight_bits(load_file(folder / "model.safetensors"), quantization)
    name = "model.layers.0.mlp.up_proj.weight"
    for bits, named in ((0xFE, []), (0xFF, [name])):
        tensors[name].view(torch.uint8)[3, 5] = bits
        reply = rank.apply(
            UpdateWeightsFromTensorReqInput(
                serialized_named_tensors=[safetensors.torch.save(tensors)], load_format="safetensors"
            )
        )
        assert (reply.num_nonfinite, name in reply.message) == (len(named), bool(named))
    rank.store.arena.close()


def test_a_broadcast_that_is_refused_unopened_is_known_by_name(rank: RealRank) -> None:
    rank.apply(BeginWeightUpdateReqInput())
    rank.apply(
        UpdateWeightsFromDistributedReqInput(names=["b", "a"], dtypes=[], shapes=[], group_name="none")
    )
    assert rank.apply(EndWeightUpdateReqInput()).fields["refusals"][0]["names"] == ["a", "b"]


class ReceivedInPlace(BroadcastSource):
    """A broadcast of tensors of NaN, received where they belong."""

    def __init__(self, entries: list[TensorHeader]) -> None:
        super().__init__(entries, None, timeout_s=1.0)  # type: ignore[arg-type]

    def receive_in_place(self, destinations: Callable[[], Sequence[Destination | None]]) -> None:
        for destination in destinations():
            assert destination is not None
            destination.region.fill_(math.nan)

    def can_receive_in_place(self, device: torch.device) -> bool:
        return True

    def arrived(self) -> bool:
        return True


def test_so_are_those_of_a_broadcast_that_is_received_where_it_belongs(
    rank: RealRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "model.norm.weight"
    header = TensorHeader(name, rank.store.shape(name), torch.float32)
    monkeypatch.setattr(weight_io, "open_broadcast", lambda *args: ReceivedInPlace([header]))
    monkeypatch.setattr(weight_io.Memberships, "get", lambda groups, name: None)
    request = UpdateWeightsFromDistributedReqInput(
        names=[name], dtypes=["float32"], shapes=[[1]], group_name="g"
    )
    assert f"1 tensors hold NaN or Inf: {name}." in rank.apply(request).message


class BusyDevice(CpuDevice):
    """Host memory that is treated as a CUDA device's: its copies are done when the test says so.

    Attributes:
        is_copying: whether copies are launched beside forward passes now.
        log: the waits.
    """

    name = "cuda:0"
    uuid = "3c1f9e0a-0000-4000-8000-0123456789ab"

    def __init__(self) -> None:
        super().__init__()
        self.is_copying = False
        self.is_done = True
        self.log: list[str] = []

    @contextmanager
    def copying(self, *, beside: bool = False) -> Iterator[None]:
        assert not self.is_copying
        self.is_copying, self.is_done = True, False
        try:
            yield
        finally:
            self.is_copying = False

    def copies_done(self) -> bool:
        assert not self.is_copying, "a question while copies are launched would never be answered by yes"
        return self.is_done

    def follow_copies(self) -> None:
        self.log.append("follow_copies")

    def synchronize(self) -> None:
        self.is_done = True
        self.log.append("synchronize")


def no_room() -> Iterator[int]:
    raise OutOfDeviceMemory(2, 1)
    yield 0


class TestCopiesBesideForwardPasses:
    @pytest.fixture
    def device(self) -> BusyDevice:
        return BusyDevice()

    @pytest.fixture
    def rank(self, checkpoints: tuple[Path, Path], device: BusyDevice) -> Iterator[RealRank]:
        rank = RealRank(checkpoints[0], device)
        yield rank
        rank.store.arena.close()

    @pytest.fixture
    def closed(self, monkeypatch: pytest.MonkeyPatch, device: BusyDevice) -> list[bool]:
        """For each source that was closed, whether its copies were done then."""
        closed: list[bool] = []

        def open_watched(*args: Any, **kwargs: Any) -> Any:
            source = open_folder(*args, **kwargs)
            close = source.close

            def watched_close() -> None:
                closed.append(device.is_done)
                close()

            source.close = watched_close  # type: ignore[method-assign]
            return source

        monkeypatch.setattr(weight_io, "open_folder", open_watched)
        return closed

    @pytest.mark.parametrize("num_tensors", [None, 3])
    def test_an_update_is_answered_when_its_copies_have_run(
        self,
        rank: RealRank,
        device: BusyDevice,
        checkpoints: tuple[Path, Path],
        monkeypatch: pytest.MonkeyPatch,
        num_tensors: int | None,
    ) -> None:
        before, where = checksum_of(rank.store), []
        write = rank.store.write_by_slices

        def watched_write(*args: Any) -> Iterator[int]:
            where.append(device.is_copying)
            return write(*args)

        monkeypatch.setattr(rank.store, "write_by_slices", watched_write)
        named = list(load_file(checkpoints[1] / "model.safetensors").items())[:num_tensors]
        update = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[safetensors.torch.save(dict(named))],
            load_format="safetensors",
            pause_mode=PauseMode.IN_PLACE,
            weight_version="b",
        )
        call = rank.call(update)
        for _ in range(20):
            rank.scheduler.turn()
        assert call not in rank.replies
        assert rank.scheduler.is_runnable
        assert rank.scheduler.control.allows_forward
        assert rank.scheduler.control.updates.version == "default"
        assert checksum_of(rank.store) == before
        for _ in range(20):
            device.is_done = True
            rank.scheduler.turn()
        assert rank.replies[call].weight_version == "b"
        assert checksum_of(rank.store) != before
        assert where == [True] * len(named)
        assert device.log == ["synchronize"]

    def test_an_update_that_ends_early_waits_before_it_lets_go_of_its_source(
        self, rank: RealRank, device: BusyDevice, checkpoints: tuple[Path, Path], closed: list[bool]
    ) -> None:
        rank.apply(BeginWeightUpdateReqInput())
        before = checksum_of(rank.store)
        call = rank.call(UpdateWeightFromDiskReqInput(model_path=str(checkpoints[1])))
        for _ in range(20):
            rank.scheduler.turn()
        assert not device.is_done
        rank.apply(AbortWeightUpdateReqInput())
        assert isinstance(rank.replies[call], Refusal)
        assert closed == [True]
        assert device.log == ["synchronize"]
        assert checksum_of(rank.store) == before

    @pytest.mark.parametrize("is_cancelled", [False, True])
    def test_forward_passes_run_behind_the_copies_of_an_update_in_place(
        self,
        rank: RealRank,
        device: BusyDevice,
        checkpoints: tuple[Path, Path],
        closed: list[bool],
        monkeypatch: pytest.MonkeyPatch,
        is_cancelled: bool,
    ) -> None:
        monkeypatch.setattr(rank.store.arena, "stage", no_room)
        call = rank.call(UpdateWeightFromDiskReqInput(model_path=str(checkpoints[1]), weight_version="b"))
        for _ in range(20):
            rank.scheduler.turn()
            assert rank.scheduler.control.allows_forward == ("follow_copies" in device.log)
        assert rank.scheduler.control.updates.version == "b"
        assert call not in rank.replies
        if is_cancelled:
            rank.apply(ReleaseMemoryOccupationReqInput(tags=("weights",)))
        else:
            device.is_done = True
        for _ in range(3):
            rank.scheduler.turn()
        assert closed == [True], "the sender has its memory back when nothing reads it"
        assert not rank.replies[call].staged
        assert rank.replies[call].content == "valid"
        assert rank.replies[call].num_nonfinite == 0
