"""Sums through peer memory on GPUs that NVLink joins: bits, any order of sizes, graphs, leaving."""

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.rank_processes import Ranks
from torch import Tensor

from ebbtide.srt.config import ParallelConfig
from ebbtide.srt.distributed.parallel_group import ParallelGroup, TorchGroup, join_parallel_group
from ebbtide.srt.distributed.peer_memory import PeerMemory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="needs two CUDA GPUs"),
]

# From one block, not full, to all of them several times, and beyond what goes through peer memory.
COUNTS = {
    torch.bfloat16: (1, 8, 1000, 4096, 4097, 100_003, 1 << 20, (1 << 20) + 16, 1 << 22, (1 << 25) + 16),
    torch.float16: (4096, 1 << 20),
    torch.float32: (4096, 1 << 20),
}


@pytest.fixture(scope="module", params=[2, 3, 4])
def gpus(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    if torch.accelerator.device_count() < request.param:
        pytest.skip(f"needs {request.param} CUDA GPUs")
    with Ranks(request.param, tmp_path_factory.mktemp("gpus"), "cuda") as ranks:
        yield ranks


def of_all(gpus: Ranks, answer: object) -> list[object]:
    return [answer] * len(gpus.processes)


def peers_of(group: ParallelGroup) -> PeerMemory:
    torch.cuda.set_device(group.rank)
    assert isinstance(group, TorchGroup)
    assert group.peers is not None
    return group.peers


def numbers(seed: int, count: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """On this rank's GPU; the same on all."""
    generator = torch.Generator().manual_seed(seed)
    some = torch.randn(min(count, 10_007), generator=generator).to("cuda", dtype)
    return some.repeat(-(-count // len(some)))[:count].clone()


def test_sums_are_rounded_once_on_all(gpus: Ranks) -> None:
    """Hence they have the same bits; NCCL's, of the longest messages, may differ in the last one."""
    assert gpus.run(add_all_sizes) == of_all(gpus, [])


def add_all_sizes(group: ParallelGroup) -> list[str]:
    """Of which messages the sums are wrong."""
    peers = peers_of(group)
    wrong = []
    for dtype, counts in COUNTS.items():
        for count in counts:
            x = numbers(group.rank, count, dtype)
            parts = [numbers(rank, count, dtype).float() for rank in range(group.size)]
            expected = sum(parts[1:], start=parts[0]).to(dtype)
            is_exact = peers.takes(x)
            total = group.all_reduce_(x)
            is_right = (
                torch.equal(total, expected) if is_exact else torch.allclose(total, expected, 2**-6, 2**-4)
            )
            if total is not x or not is_right or is_exact != (x.nbytes <= peers.max_bytes):
                wrong.append(f"{count} {dtype}")
    return wrong


def test_calls_of_many_sizes_follow_one_another_without_waiting(gpus: Ranks) -> None:
    """Slots are used again, while one rank comes late, and then the other."""
    assert gpus.run(add_in_any_order, 600) == of_all(gpus, [])


def add_in_any_order(group: ParallelGroup, num_calls: int) -> list[int]:
    """Numbers of the calls whose sums are wrong."""
    peers = peers_of(group)
    order = random.Random(7)
    sums: list[tuple[Tensor, Tensor]] = []
    for call in range(num_calls):
        count = 32 * order.choice((1, 100, 128, 129, 512, 4096, 32_768, 50_000))
        add_up = order.choice((peers.words_, peers.one_shot_, peers.two_shot_))
        if count > 1 << 17:
            add_up = order.choice((peers.one_shot_, peers.two_shot_))
        late = order.choice((0, 0, 0, 1)) * order.choice(range(1, group.size + 1))
        base = torch.arange(count, device="cuda") % 61 + call % 7
        x = (base + group.rank).to(torch.bfloat16)
        if late == group.rank + 1:
            torch.cuda._sleep(2_000_000)
        sums.append((add_up(x), sum_of_ranks(group, base).to(torch.bfloat16)))
    return [call for call, (ours, expected) in enumerate(sums) if not torch.equal(ours, expected)]


def sum_of_ranks(group: ParallelGroup, base: Any) -> Any:
    """That of base + rank over all ranks."""
    return group.size * base + sum(range(group.size))


def test_a_captured_graph_adds_up_at_every_replay(gpus: Ranks) -> None:
    assert gpus.run(replay, 40) == of_all(gpus, [])


def replay(group: ParallelGroup, num_replays: int) -> list[int]:
    """Numbers of the replays whose sums are wrong; calls outside the graph come in between."""
    peers_of(group)
    counts = (4096, 5000, 65_536, 1 << 21)
    inputs = [torch.zeros(count, dtype=torch.bfloat16, device="cuda") for count in counts]
    outputs = [torch.zeros_like(each) for each in inputs]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph = torch.cuda.CUDAGraph()
        for capturing in (False, True):
            if capturing:
                torch.cuda.synchronize()
                graph.capture_begin(capture_error_mode="thread_local")
            for x, out in zip(inputs, outputs, strict=True):
                group.all_reduce_(out.copy_(x))
        graph.capture_end()
    torch.cuda.synchronize()
    wrong = []
    for number in range(num_replays):
        for x in inputs:
            x.fill_(number + group.rank)
        if number % 3 == 0:
            group.all_reduce_(torch.ones(9000, dtype=torch.bfloat16, device="cuda"))
        graph.replay()
        if not all(bool((out == sum_of_ranks(group, number)).all()) for out in outputs):
            wrong.append(number)
    return wrong


def test_who_leaves_no_longer_waits_for_a_rank_that_does_not_come(gpus: Ranks, tmp_path: Path) -> None:
    assert gpus.run(add_alone_and_leave, f"file://{tmp_path}/another") == of_all(gpus, True)


def add_alone_and_leave(group: ParallelGroup, rendezvous: str) -> bool:
    """Whether the first rank's kernel waits until the rank has left another group of these processes."""
    peers_of(group)
    parallel = ParallelConfig(tp_size=group.size, tp_rank=group.rank)
    device = torch.device("cuda", group.rank)
    other = join_parallel_group(parallel, rendezvous, device, 60.0)
    peers_of(other)
    was_waiting = True
    if other.rank == 0:
        other.all_reduce_(torch.ones(4096, dtype=torch.bfloat16, device=device))
        done = torch.cuda.Event()
        done.record()
        time.sleep(0.5)
        was_waiting = not done.query()
        other.close()
        done.synchronize()
    # The other ranks stay until the first has left.
    group.smallest(0)
    other.close()
    return was_waiting
