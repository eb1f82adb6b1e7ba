"""How ranks meet, add, gather, and notice that one of them is gone."""

import logging
import socket
import time
from pathlib import Path
from typing import ClassVar
from unittest.mock import patch

import psutil
import pytest
import torch
from fixtures.deadlines import HANG_S
from fixtures.rank_processes import Ranks
from torch import Tensor

from ebbtide.srt.config import ParallelConfig
from ebbtide.srt.distributed import peer_memory
from ebbtide.srt.distributed.parallel_group import ParallelGroup, join_parallel_group
from ebbtide.srt.errors import EngineError

CPU = torch.device("cpu")


def noise(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def add(group: ParallelGroup, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    mine = noise(group.rank, shape, dtype)
    total = group.all_reduce_(mine)
    assert total is mine
    return total


def gather(group: ParallelGroup, shape: tuple[int, ...], dtype: torch.dtype, dim: int) -> Tensor:
    return group.all_gather(noise(group.rank, shape, dtype), dim)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_have_the_same_bits_on_every_rank(dtype: torch.dtype, two_ranks: Ranks) -> None:
    shape = (513, 64)
    totals = two_ranks.run(add, shape, dtype)

    assert torch.equal(*totals)
    expected = noise(0, shape, torch.float64) + noise(1, shape, torch.float64)
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.05, "rtol": 0.05}
    torch.testing.assert_close(totals[0].double(), expected, **tolerance)


@pytest.mark.parametrize(("shape", "dtype", "dim"), [((1, 4), torch.bfloat16, 0), ((5, 3), torch.float32, 1)])
def test_parts_are_gathered_in_the_ranks_order(
    shape: tuple[int, ...], dtype: torch.dtype, dim: int, two_ranks: Ranks
) -> None:
    gathered = two_ranks.run(gather, shape, dtype, dim)

    expected = torch.cat([noise(rank, shape, dtype) for rank in range(2)], dim)
    assert all(torch.equal(each, expected) for each in gathered)
    assert all(each.stride() == expected.stride() for each in gathered)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_ranks_of_several_nodes_meet_at_a_port(host: str, two_ranks: Ranks) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Others hold the port without listening, as launchers do until the ranks are there.
    with socket.socket(family) as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((host, 0))
        port = reserved.getsockname()[1]
        rendezvous = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"

        sums = two_ranks.run(join_another, rendezvous)

    assert [total for total, _ in sums] == [21.0, 21.0]
    assert sums[0][1] == [host]


def join_another(group: ParallelGroup, rendezvous: str) -> tuple[float, list[str]]:
    """The sum in another group of these processes, and the addresses at which this one listens for it."""
    parallel = ParallelConfig(tp_size=2, tp_rank=group.rank)
    other = join_parallel_group(parallel, rendezvous, CPU, HANG_S)
    total = other.all_reduce_(torch.tensor([10.0 + other.rank])).item()
    connections = psutil.Process().net_connections("tcp")
    port = int(rendezvous.rpartition(":")[2])
    return total, [
        each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN and each.laddr.port == port
    ]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_nobody_joins_gives_up(rank: int, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=f"rank {rank} of 2 did not join .* at file:.* within 0.5 s"):
        join_parallel_group(ParallelConfig(tp_size=2, tp_rank=rank), f"file://{tmp_path}/here", CPU, 0.5)


def test_a_group_that_was_left_is_not_used_and_who_waits_for_the_dead_is_told(tmp_path: Path) -> None:
    with Ranks(2, tmp_path) as ranks:
        left = "the group of tensor-parallel ranks has been left"
        assert ranks.run(leave_and_add, f"file://{tmp_path}/another") == [left, left]
        ranks.tell(0, add, (4,), torch.float32)
        # The first rank is in the collective, or about to be: either way nobody answers.
        time.sleep(0.2)
        ranks.processes[1].kill()

        with pytest.raises(AssertionError, match=r"(?s)rank 0: .*RuntimeError"):
            ranks.answer(0)


def leave_and_add(group: ParallelGroup, rendezvous: str) -> str:
    """What is said where another group of these processes was left."""
    other = join_parallel_group(ParallelConfig(tp_size=2, tp_rank=group.rank), rendezvous, CPU, HANG_S)
    other.close()
    other.close()
    with pytest.raises(EngineError) as refused:
        other.all_reduce_(torch.ones(1))
    return str(refused.value)


class ScriptedPeerMemory:
    """Stands for the GPUs' memory: fails on one rank, at one stage."""

    failing: ClassVar[tuple[int, str]]
    offer = peer_memory.Offer("handle", "bus")
    num_bytes = 8

    def __init__(self, store: object, rank: int, size: int, device: torch.device) -> None:
        self._rank = rank
        self._fail_at("allocate")

    def open(self, offers: list[peer_memory.Offer]) -> None:
        assert offers == [self.offer] * 2
        self._fail_at("open")

    def meet(self, timeout_s: float) -> str | None:
        return "wrong sums" if self.failing == (self._rank, "meet") else None

    def close(self) -> None:
        """The real one waits for the others here."""

    def _fail_at(self, stage: str) -> None:
        if self.failing == (self._rank, stage):
            raise EngineError(f"cannot {stage}\nand why")


@pytest.mark.parametrize(
    ("stage", "problem", "failing_rank"),
    [
        ("allocate", "cannot allocate", 0),
        ("open", "cannot open", 1),
        ("meet", "wrong sums", 1),
        ("host", None, 0),
    ],
)
def test_where_one_rank_has_no_peer_memory_none_uses_it(
    stage: str, problem: str | None, failing_rank: int, two_ranks: Ranks, tmp_path: Path
) -> None:
    (has_first, said), (has_second, said_by_second) = two_ranks.run(
        open_peer_memory, tmp_path / "store", (failing_rank, stage)
    )

    assert (has_first, has_second) == (False, False)
    reason = "the ranks are on several hosts" if problem is None else f"rank {failing_rank}: {problem}"
    assert said == [f"all-reduce by NCCL alone, which takes longer for short messages: {reason}"]
    assert said_by_second == []


def test_peer_memory_is_used_where_every_rank_has_it(two_ranks: Ranks, tmp_path: Path) -> None:
    opened = two_ranks.run(open_peer_memory, tmp_path / "store", (2, "open"))

    message = "short messages are summed through peer memory: buffer_bytes=8"
    assert opened == [(True, [message]), (True, [])]


def open_peer_memory(group: ParallelGroup, path: Path, failing: tuple[int, str]) -> tuple[bool, list[str]]:
    """Whether this rank uses it, and what it logs."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    host = f"host {group.rank}" if failing[1] == "host" else "host"
    peer_memory.logger.addHandler(handler)
    peer_memory.logger.setLevel(logging.INFO)
    ScriptedPeerMemory.failing = failing
    try:
        with (
            patch.object(peer_memory, "PeerMemory", ScriptedPeerMemory),
            patch.object(peer_memory, "_host", lambda: host),
        ):
            store = torch.distributed.FileStore(str(path), 2)
            opened = peer_memory.open_peer_memory(store, group.rank, 2, CPU)
    finally:
        peer_memory.logger.removeHandler(handler)
    return opened is not None, said
