"""Room for the passes of several ranks: all of them find it, or none does, and they seldom ask each other.

The ranks are threads, on devices that only count; who asks alone waits for the others until the test fails.
"""

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fixtures.deadlines import HANG_S

from ebbtide.srt.device import CpuDevice
from ebbtide.srt.distributed.parallel_group import ParallelGroup
from ebbtide.srt.model_executor import pass_room
from ebbtide.srt.model_executor.batch_plan import PassOutOfMemory
from ebbtide.srt.model_executor.pass_room import PassRoom

TOKEN_BYTES, ROW_BYTES = 10, 100


@pytest.fixture(autouse=True)
def _passes_that_take_by_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_room, "FIXED_BYTES", 0)


class CountingDevice(CpuDevice):
    """So many bytes that passes may have.

    Attributes:
        kept_bytes: for reuse.
    """

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes, self.kept_bytes = total_bytes, 0

    def make_room(self, num_bytes: int) -> bool:
        if num_bytes <= self.total_bytes:
            self.kept_bytes = max(num_bytes, self.kept_bytes)
        return num_bytes <= self.total_bytes

    def trim(self) -> None:
        self.kept_bytes = 0

    def free_bytes(self) -> int:
        return self.total_bytes - self.kept_bytes


class Meeting:
    """Where threads find the least of their values."""

    def __init__(self, size: int) -> None:
        self.num_asked = 0
        self.values = [0] * size
        self._barrier = threading.Barrier(size)

    def least(self, rank: int, value: int) -> int:
        self.values[rank] = value
        self._barrier.wait(HANG_S)
        least = min(self.values)
        self.num_asked += self._barrier.wait(HANG_S) == 0
        return least


class ThreadGroup(ParallelGroup):
    def __init__(self, meeting: Meeting, rank: int) -> None:
        super().__init__(len(meeting.values), rank)
        self._meeting = meeting

    def smallest(self, value: int) -> int:
        return self._meeting.least(self.rank, value)


class Ranks:
    """So many, each with a device of its own, with this much room."""

    def __init__(self, *total_bytes: int) -> None:
        self.meeting = Meeting(len(total_bytes))
        self.devices = [CountingDevice(each) for each in total_bytes]
        self.rooms = [
            PassRoom(device, ThreadGroup(self.meeting, rank), TOKEN_BYTES, ROW_BYTES)
            for rank, device in enumerate(self.devices)
        ]

    def run(self, act: Callable[[int, PassRoom], Any]) -> list[Any]:
        """What comes of it on each rank, at once."""
        with ThreadPoolExecutor(len(self.rooms)) as threads:
            return list(threads.map(act, range(len(self.rooms)), self.rooms))

    def make(self, num_tokens: int, num_rows: int) -> str | None:
        """Why there is no room, on all ranks alike."""
        [reason] = set(self.run(lambda _, room: made(room, num_tokens, num_rows)))
        return reason


def made(room: PassRoom, num_tokens: int, num_rows: int, more_bytes: int = 0) -> str | None:
    try:
        room.make(num_tokens, num_rows, more_bytes)
    except PassOutOfMemory as error:
        return str(error)
    return None


@pytest.mark.parametrize("lacking", [0, 1, 2])
def test_where_one_rank_has_no_room_none_keeps_any_and_smaller_passes_have_some(lacking: int) -> None:
    ranks = Ranks(*(561 if rank == lacking else 10_000 for rank in range(3)))
    assert ranks.make(10, 1) is None
    assert ranks.make(40, 1) == f"rank {lacking} has no room for 562 bytes; 561 are free"
    assert [device.kept_bytes for device in ranks.devices] == [0, 0, 0]
    assert ranks.make(20, 1) is None
    ranks.devices[lacking].total_bytes = 843
    assert ranks.make(40, 1) is None
    assert [device.kept_bytes for device in ranks.devices] == [843, 843, 843]


def test_of_several_without_room_the_one_with_least_is_named() -> None:
    assert Ranks(40, 30, 50, 30).make(1, 1) == "rank 1 has no room for 123 bytes; 30 are free"


def test_a_pass_that_fits_just_so_runs_and_no_larger_one_counts_on_its_room() -> None:
    ranks = Ranks(10_000, 562)
    assert ranks.make(40, 1) is None
    num_asked = ranks.meeting.num_asked
    assert ranks.make(40, 1) is None
    assert ranks.meeting.num_asked == num_asked
    assert ranks.make(41, 1) == "rank 1 has no room for 573 bytes; 562 are free"


def test_what_is_taken_beside_tokens_and_logits_and_by_every_pass_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pass_room, "FIXED_BYTES", 50)
    ranks = Ranks(225, 225)
    assert ranks.run(lambda _, room: made(room, 1, 1, 40)) == [None, None]
    [reason] = set(ranks.run(lambda _, room: made(room, 1, 1, 41)))
    assert reason == "rank 0 has no room for 226 bytes; 225 are free"


def test_passes_that_grow_seldom_ask_and_the_same_ones_never(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_room, "SPARE_BYTES", 2000)
    ranks = Ranks(10**6, 10**6)
    for num_tokens in [*range(1, 800), *range(1, 800)]:
        ranks.make(num_tokens, 1)
    assert ranks.meeting.num_asked <= 12
    ranks.make(2000, 1)
    assert ranks.devices[0].kept_bytes == 24_612
    num_asked = ranks.meeting.num_asked
    ranks.run(lambda _, room: room.forget())
    ranks.make(1, 1)
    assert ranks.meeting.num_asked == num_asked + 1


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_agree_whoever_has_no_room_when(num_ranks: int) -> None:
    """What is drawn by `common` is the same on all ranks; memory comes and goes on each as it likes."""

    def passes(rank: int, room: PassRoom) -> list[str | None]:
        common, own = random.Random(1), random.Random(2 + rank)
        reasons = []
        for _ in range(3000):
            if common.random() < 0.1:
                room.forget()
            ranks.devices[rank].total_bytes = own.choice([50, 600, 3000, 10**6])
            if own.random() < 0.1:
                ranks.devices[rank].trim()
            reasons.append(made(room, common.randrange(1, common.choice([3, 900])), common.randrange(1, 9)))
        return reasons

    ranks = Ranks(*[0] * num_ranks)
    first, *others = ranks.run(passes)
    assert all(reasons == first for reasons in others)
    assert {f"rank {rank}" for rank in range(num_ranks)} == {reason[:6] for reason in first if reason}
    assert None in first
