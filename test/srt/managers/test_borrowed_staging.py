"""Updates where no memory is free: the second copy is made of the KV cache's chunks, which it gets back.

Real weights, a real KV cache, real host memory with a budget: a forward pass that touched a chunk that is
lent would end the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fixtures.budgeted_memory import BudgetedMemory
from fixtures.checkpoints import make_checkpoint

from ebbtide.srt.config import resolve
from ebbtide.srt.device.cpu import CpuDevice
from ebbtide.srt.managers.io_struct import (
    AbortWeightUpdateReqInput,
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
from ebbtide.srt.managers.scheduling.assembly import SchedulerConfig, assemble_scheduler
from ebbtide.srt.managers.scheduling.lockstep import Inbox
from ebbtide.srt.managers.scheduling.scheduler_process import rank_parts
from ebbtide.srt.managers.wire.generation import TokenizedGenerateReqInput, TokenOutput
from ebbtide.srt.memory_saver.chunk_pool import ChunkArena
from ebbtide.srt.memory_saver.saver import VirtualMemorySaver
from ebbtide.srt.memory_saver.tags import MemoryTag
from ebbtide.srt.memory_saver.virtual_memory.host import HostVirtualMemory
from ebbtide.srt.model_executor.builder import build_model_runner
from ebbtide.srt.sampling_params import SamplingParams
from ebbtide.srt.server_args import ServerArgs

CHUNK = HostVirtualMemory.granularity
# A page of 8 tokens takes 64 KiB, and a chunk holds 32 of them, a context of 256 tokens. The weights take
# four chunks.
SHAPE = {"head_dim": 128, "num_key_value_heads": 4, "intermediate_size": 3600}
NUM_KV_CHUNKS, CHUNK_TOKENS = 8, 256
KV = (MemoryTag.KV_CACHE,)


class Rank:
    """A scheduler over a real model runner, turned by hand, on a machine whose memory it has used up."""

    def __init__(self, path: Path, **args: Any) -> None:
        config = resolve(
            ServerArgs(
                model_path=str(path),
                max_total_tokens=NUM_KV_CHUNKS * CHUNK_TOKENS,
                page_size=8,
                skip_tokenizer_init=True,
                **args,
            )
        )
        device = CpuDevice()
        self.vm = BudgetedMemory(1 << 40, HostVirtualMemory())
        saver = VirtualMemorySaver(self.vm)
        runner = build_model_runner(
            config.model, config.cache, config.schedule, config.runtime, device, saver
        )
        self.vm.budget_bytes = self.vm.taken_bytes
        self.store = runner.weight_store
        assert isinstance(runner.kv_pool.arena, ChunkArena)
        self.kv = runner.kv_pool.arena
        self.replies: dict[str, Any] = {}
        self.tokens: dict[str, list[int]] = {}
        self._incoming: list[Any] = []
        self._num_calls = 0
        self.scheduler = assemble_scheduler(
            SchedulerConfig.of(config), rank_parts(config, runner, device, saver), Inbox(self, self), self
        )

    def receive(self, timeout_s: float | None) -> list[Any]:
        messages, self._incoming = self._incoming, []
        return messages

    def send(self, message: Any) -> None:
        if isinstance(message, ControlReply):
            self.replies[message.id] = message.reply
        elif isinstance(message, TokenOutput):
            for output in message.outputs:
                self.tokens[output.rid].extend(output.token_ids)

    def generate(self, prompt: list[int], num_tokens: int) -> str:
        rid = f"request-{len(self.tokens)}"
        self.tokens[rid] = []
        params = SamplingParams(max_new_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        self._incoming.append(
            TokenizedGenerateReqInput(
                rid=rid,
                input_ids=prompt,
                sampling_params=params,
                max_new_tokens=num_tokens,
                seed=0,
                stream=True,
            )
        )
        return rid

    def turn(self, count: int) -> None:
        for _ in range(count):
            self.scheduler.turn()

    def run(self) -> None:
        while self.scheduler.is_runnable or self._incoming:
            self.scheduler.turn()

    def apply(self, request: Any) -> Any:
        self._num_calls += 1
        call_id = str(self._num_calls)
        self._incoming.append(ControlCall(id=call_id, request=request))
        for _ in range(200):
            self.scheduler.turn()
            if call_id in self.replies:
                return self.replies[call_id]
        raise AssertionError("no reply")

    def assert_whole(self) -> None:
        """The KV cache has all of its memory and all of its pages, and nothing more is held than before."""
        assert self.kv.resident_bytes == NUM_KV_CHUNKS * CHUNK
        assert self.scheduler.policy.allocator.num_withdrawn == 0
        assert self.vm.taken_bytes == self.vm.budget_bytes


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "LlamaForCausalLM", **SHAPE)


@pytest.fixture
def make_rank(path: Path) -> Iterator[Callable[..., Rank]]:
    made: list[Rank] = []

    def make(**args: Any) -> Rank:
        made.append(Rank(path, **args))
        assert made[-1].store.num_chunks == 4
        return made[-1]

    yield make
    for rank in made:
        rank.kv.close()
        rank.store.arena.close()
        assert rank.vm.taken_bytes == 0


def prompt(seed: int, length: int) -> list[int]:
    return [(seed * 37 + index * 11) % 256 for index in range(length)]


def update(path: Path, **fields: Any) -> UpdateWeightFromDiskReqInput:
    """To the weights that serve already: streams must not notice it."""
    fields = {"pause_mode": PauseMode.IN_PLACE, "flush_cache": False, "weight_version": "b"} | fields
    return UpdateWeightFromDiskReqInput(model_path=str(path), **fields)


def test_streams_go_on_beside_updates_and_nothing_is_allocated(
    make_rank: Callable[..., Rank], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, undisturbed = make_rank(), make_rank()
    rids = [rank.generate(prompt(seed, 40), 120) for seed in range(3)]
    for seed in range(3):
        undisturbed.generate(prompt(seed, 40), 120)
    undisturbed.run()
    rank.turn(10)
    for call in ("create", "release"):
        monkeypatch.setattr(rank.vm, call, lambda _, call=call: pytest.fail(f"{call} was called"))
    for number in range(3):
        reply = rank.apply(update(path, weight_version=str(number)))
        assert isinstance(reply, UpdateWeightsReqOutput), reply
        assert (reply.staged, reply.weight_version) == (True, str(number))
        rank.turn(5)
        rank.assert_whole()
    rank.run()
    assert [rank.tokens[rid] for rid in rids] == list(undisturbed.tokens.values())
    # Every chunk works again, those that hold what was the weights' memory too.
    again = [rank.generate(prompt(100 + seed, 200), 40) for seed in range(8)]
    expected = [undisturbed.generate(prompt(100 + seed, 200), 40) for seed in range(8)]
    rank.run()
    undisturbed.run()
    assert [rank.tokens[rid] for rid in again] == [undisturbed.tokens[rid] for rid in expected]
    monkeypatch.undo()


def test_cached_pages_make_room_where_no_chunk_is_empty(make_rank: Callable[..., Rank], path: Path) -> None:
    rank, undisturbed = make_rank(), make_rank()
    for one in (rank, undisturbed):
        for seed in range(9):
            one.generate(prompt(seed, 200), 30)
        one.run()
    allocator, cache = rank.scheduler.policy.allocator, rank.scheduler.policy.cache
    num_cached = cache.num_cached_pages
    assert not allocator.withdrawable()
    live, expected = (one.generate(prompt(8, 200), 50) for one in (rank, undisturbed))
    rank.turn(4)
    reply = rank.apply(update(path))
    assert isinstance(reply, UpdateWeightsReqOutput), reply
    assert reply.staged
    assert 0 < cache.num_cached_pages < num_cached
    rank.run()
    undisturbed.run()
    assert rank.tokens[live] == undisturbed.tokens[expected]
    rank.assert_whole()


@pytest.mark.parametrize(
    ("args", "num_requests"), [({"update_staging": "never"}, 0), ({}, 7)], ids=["never", "all pages are live"]
)
def test_without_anything_to_borrow_updates_are_written_in_place(
    make_rank: Callable[..., Rank], path: Path, args: dict[str, Any], num_requests: int
) -> None:
    rank = make_rank(**args)
    rids = [rank.generate(prompt(seed, 200), 40) for seed in range(num_requests)]
    rank.turn(15)
    reply = rank.apply(update(path))
    assert isinstance(reply, UpdateWeightsReqOutput), reply
    assert not reply.staged
    rank.run()
    assert all(len(rank.tokens[rid]) == 40 for rid in rids)
    rank.assert_whole()


def test_what_was_borrowed_comes_back_when_a_session_is_given_up(
    make_rank: Callable[..., Rank], path: Path, tmp_path: Path
) -> None:
    rank = make_rank()
    before = rank.store.checksum()
    other = make_checkpoint(tmp_path / "other", "LlamaForCausalLM", seed=5, **SHAPE)
    rank.apply(BeginWeightUpdateReqInput())
    assert rank.apply(update(other)).staged
    assert rank.kv.resident_bytes == (NUM_KV_CHUNKS - 4) * CHUNK
    rid = rank.generate(prompt(1, 200), 40)
    rank.run()
    assert len(rank.tokens[rid]) == 40
    rank.apply(AbortWeightUpdateReqInput())
    rank.assert_whole()
    assert rank.store.checksum() == before
    assert rank.apply(update(other)).staged
    assert rank.store.checksum() != before


@pytest.mark.parametrize("is_resumed", [True, False])
def test_the_kv_cache_may_be_released_while_its_memory_is_lent(
    make_rank: Callable[..., Rank], path: Path, is_resumed: bool
) -> None:
    rank = make_rank()
    rid = rank.generate(prompt(1, 100), 100)
    rank.turn(5)
    rank.apply(BeginWeightUpdateReqInput())
    assert rank.apply(update(path)).staged
    assert rank.apply(ReleaseMemoryOccupationReqInput(tags=KV)).freed_bytes == {
        MemoryTag.KV_CACHE: (NUM_KV_CHUNKS - 4) * CHUNK
    }
    if is_resumed:
        rank.apply(ResumeMemoryOccupationReqInput(tags=KV))
    reply = rank.apply(EndWeightUpdateReqInput(pause_mode=PauseMode.IN_PLACE, flush_cache=False))
    assert not isinstance(reply, Refusal), reply
    if not is_resumed:
        # What was lent has gone to the system, and comes back with the rest.
        assert rank.vm.taken_bytes == 4 * CHUNK
        assert rank.apply(ResumeMemoryOccupationReqInput(tags=KV)).mapped_bytes == {
            MemoryTag.KV_CACHE: NUM_KV_CHUNKS * CHUNK
        }
    rank.run()
    assert len(rank.tokens[rid]) == 100
    rank.assert_whole()
