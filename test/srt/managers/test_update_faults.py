"""Faults at each step of an update of real weights: the old serve bit for bit, the next update works."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fixtures.checkpoints import make_checkpoint

from ebbtide.srt.config import EngineConfig, resolve
from ebbtide.srt.device.choose import open_memory_saver
from ebbtide.srt.device.cpu import CpuDevice
from ebbtide.srt.managers.assembly import SchedulerConfig, assemble_scheduler
from ebbtide.srt.managers.io_struct import (
    BeginWeightUpdateReqInput,
    ControlCall,
    ControlReply,
    EndWeightUpdateReqInput,
    PauseMode,
    Refusal,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsReqOutput,
)
from ebbtide.srt.managers.replication import Inbox
from ebbtide.srt.managers.scheduler_process import rank_parts
from ebbtide.srt.memory_saver.arena import Shadow
from ebbtide.srt.memory_saver.tags import MemoryTag
from ebbtide.srt.model_executor.builder import build_model_runner
from ebbtide.srt.model_executor.weight_store import WeightStore
from ebbtide.srt.server_args import ServerArgs


class Fault(Exception):
    """What the tests inject."""


class Rank:
    """A scheduler over a real model runner, in this process, turned by hand."""

    def __init__(self, config: EngineConfig) -> None:
        device = CpuDevice()
        saver = open_memory_saver(config.memory.backend, device)
        runner = build_model_runner(
            config.model, config.cache, config.schedule, config.runtime, device, saver
        )
        self.store: WeightStore = runner.weight_store
        self.replies: dict[str, Any] = {}
        self._incoming: list[Any] = []
        parts = rank_parts(config, runner, device, saver)
        self.scheduler = assemble_scheduler(SchedulerConfig.of(config), parts, Inbox(self, self), self)

    def receive(self, timeout_s: float | None) -> list[Any]:
        messages, self._incoming = self._incoming, []
        return messages

    def send(self, message: Any) -> None:
        if isinstance(message, ControlReply):
            self.replies[message.id] = message.reply

    def apply(self, request: Any) -> Any:
        call_id = str(len(self.replies))
        self._incoming.append(ControlCall(id=call_id, request=request))
        for _ in range(100):
            self.scheduler.turn()
            if call_id in self.replies:
                return self.replies[call_id]
        raise AssertionError("no reply")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    first, second = (
        make_checkpoint(folder / name, "Qwen3ForCausalLM", seed=seed) for seed, name in enumerate("ab")
    )
    return first, second


@pytest.fixture
def rank(checkpoints: tuple[Path, Path]) -> Iterator[Rank]:
    args = ServerArgs(model_path=str(checkpoints[0]), max_total_tokens=256, skip_tokenizer_init=True)
    rank = Rank(resolve(args))
    yield rank
    rank.store.arena.close()


def failing_after(count: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, but for call number `count` and all later ones."""
    calls = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > count:
            raise Fault(f"call {calls} of {function.__name__}")
        return function(*args, **kwargs)

    return call


def failing_iterator(*args: Any) -> Iterator[int]:
    yield 0
    raise Fault("half-way through the rest")


# What is broken, and how: the steps of an update in their order.
FAULTS: dict[str, Callable[[pytest.MonkeyPatch, Rank], None]] = {
    "finding room": lambda patch, rank: patch.setattr(
        rank.store.arena, "stage_by_chunks", failing_after(0, rank.store.arena.stage_by_chunks)
    ),
    "first write": lambda patch, rank: patch.setattr(
        rank.store, "write_by_slices", failing_after(0, rank.store.write_by_slices)
    ),
    "a later write": lambda patch, rank: patch.setattr(
        rank.store, "write_by_slices", failing_after(7, rank.store.write_by_slices)
    ),
    "completing": lambda patch, rank: patch.setattr(rank.store, "complete", failing_iterator),
    "swapping": lambda patch, rank: patch.setattr(
        rank.store.arena, "swap", failing_after(0, rank.store.arena.swap)
    ),
    "making a view": lambda patch, rank: patch.setattr(Shadow, "view", failing_after(3, Shadow.view)),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("in_session", [False, True])
def test_a_fault_at_any_step_leaves_the_old_weights(
    rank: Rank, checkpoints: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, fault: str, in_session: bool
) -> None:
    update = UpdateWeightFromDiskReqInput(model_path=str(checkpoints[1]), weight_version="b")
    before = rank.store.checksum()
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
    assert rank.store.checksum() == before
    assert rank.scheduler.control.allows_forward
    assert rank.scheduler.control.updates.version == "default"

    again = rank.apply(update)
    if in_session:
        assert rank.store.checksum() == before
        again = rank.apply(EndWeightUpdateReqInput())
    assert isinstance(again, UpdateWeightsReqOutput)
    assert (again.weight_version, again.content) == ("b", "valid")
    assert rank.store.checksum() != before


@pytest.mark.parametrize("count", [0, 7])
def test_a_fault_over_stale_weights_leaves_them_stale(
    rank: Rank, checkpoints: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    tags = (MemoryTag.WEIGHTS,)
    before = rank.store.checksum()
    rank.apply(ReleaseMemoryOccupationReqInput(tags=tags))
    rank.apply(ResumeMemoryOccupationReqInput(tags=tags))
    update = UpdateWeightFromDiskReqInput(model_path=str(checkpoints[0]), pause_mode=PauseMode.IN_PLACE)
    with monkeypatch.context() as patch:
        patch.setattr(rank.store, "write_by_slices", failing_after(count, rank.store.write_by_slices))
        reply = rank.apply(update)
    assert isinstance(reply, Refusal)
    assert reply.status == 500
    assert not rank.scheduler.control.allows_forward
    assert rank.apply(update).content == "valid"
    assert rank.store.checksum() == before


def test_updates_back_and_forth_end_where_they_began(rank: Rank, checkpoints: tuple[Path, Path]) -> None:
    before = rank.store.checksum()
    address = rank.store.arena.address
    for number in range(20):
        reply = rank.apply(UpdateWeightFromDiskReqInput(model_path=str(checkpoints[(number + 1) % 2])))
        assert reply.staged
    assert rank.store.checksum() == before
    assert rank.store.arena.address == address
