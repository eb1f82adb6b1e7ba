"""Updates where no memory is free: the second copy is made of the KV cache's chunks, which it gets back.

Real weights, a real KV cache, real host memory with a budget: a forward pass that touched a chunk that is
lent would end the process.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from fixtures.checkpoints import checksum_of, make_checkpoint
from fixtures.full_rank import CHUNK, KV, NUM_KV_CHUNKS, SHAPE, Rank, prompt

from ebbtide.srt.errors import EngineError
from ebbtide.srt.managers.io_struct import (
    AbortWeightUpdateReqInput,
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    PauseMode,
    Refusal,
    ReleaseMemoryOccupationReqInput,
    ResizeMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsReqOutput,
)
from ebbtide.srt.memory_saver import MemoryTag


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


Requests = list[tuple[list[int], int]]
Tokens = Callable[[Requests], list[list[int]]]


@pytest.fixture(scope="module")
def undisturbed(path: Path) -> Iterator[Tokens]:
    """What requests get that nothing befalls."""
    rank = Rank(path)
    known: dict[str, list[list[int]]] = {}

    def tokens(requests: Requests) -> list[list[int]]:
        if (key := repr(requests)) not in known:
            rids = begin(rank, requests)
            rank.run()
            known[key] = told(rank, rids)
        return known[key]

    yield tokens
    rank.kv.close()
    rank.store.arena.close()


def begin(rank: Rank, requests: Requests) -> list[str]:
    return [rank.generate(*request) for request in requests]


def told(rank: Rank, rids: list[str]) -> list[list[int]]:
    return [rank.tokens[rid] for rid in rids]


def update(path: Path, **fields: Any) -> UpdateWeightFromDiskReqInput:
    """To the weights that serve already: streams must not notice it."""
    fields = {"pause_mode": PauseMode.IN_PLACE, "flush_cache": False, "weight_version": "b"} | fields
    return UpdateWeightFromDiskReqInput(model_path=str(path), **fields)


def test_streams_go_on_beside_updates_and_nothing_is_allocated(
    make_rank: Callable[..., Rank], undisturbed: Tokens, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, requests = make_rank(), [(prompt(seed, 40), 120) for seed in range(3)]
    rids = begin(rank, requests)
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
    assert told(rank, rids) == undisturbed(requests)
    # Every chunk works again, those that hold what was the weights' memory too.
    requests = [(prompt(100 + seed, 200), 40) for seed in range(8)]
    rids = begin(rank, requests)
    rank.run()
    assert told(rank, rids) == undisturbed(requests)
    monkeypatch.undo()


def test_cached_pages_make_room_where_no_chunk_is_empty(
    make_rank: Callable[..., Rank], undisturbed: Tokens, path: Path
) -> None:
    rank = make_rank()
    begin(rank, [(prompt(seed, 200), 30) for seed in range(9)])
    rank.run()
    allocator, cache = rank.scheduler.policy.allocator, rank.scheduler.policy.cache
    assert not allocator.withdrawable()
    requests = [(prompt(8, 200), 50)]
    rids = begin(rank, requests)
    rank.turn(4)
    num_evictable = cache.num_evictable_pages
    assert rank.apply(update(path)).staged
    assert 0 < cache.num_evictable_pages < num_evictable
    rank.run()
    assert told(rank, rids) == undisturbed(requests)
    rank.assert_whole()


@pytest.mark.parametrize(("update_staging", "is_staged"), [("auto", False), ("always", True)])
def test_where_all_pages_are_live_only_a_copy_that_must_be_takes_the_memory_of_the_youngest(
    make_rank: Callable[..., Rank],
    undisturbed: Tokens,
    path: Path,
    update_staging: str,
    is_staged: bool,
) -> None:
    rank = make_rank(update_staging=update_staging)
    requests = [(prompt(seed, 200), 40) for seed in range(7)]
    rids = begin(rank, requests)
    rank.turn(15)
    assert rank.apply(update(path)).staged is is_staged
    rank.run()
    assert told(rank, rids) == undisturbed(requests)
    rank.assert_whole()


@pytest.mark.parametrize("fails", [False, True], ids=["at once", "later, where the driver fails"])
def test_what_was_borrowed_comes_back_when_a_session_is_given_up(
    make_rank: Callable[..., Rank],
    path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fails: bool,
) -> None:
    rank = make_rank()
    before = checksum_of(rank.store)
    other = make_checkpoint(tmp_path / "other", "LlamaForCausalLM", seed=5, **SHAPE)
    rank.apply(BeginWeightUpdateReqInput())
    assert rank.apply(update(other)).staged
    assert rank.kv.resident_bytes == (NUM_KV_CHUNKS - 4) * CHUNK
    rid = rank.generate(prompt(1, 200), 40)
    rank.run()
    assert len(rank.tokens[rid]) == 40
    with monkeypatch.context() as patch:
        if fails:
            patch.setattr(rank.vm, "map", Mock(side_effect=EngineError("cuMemMap")), raising=False)
        assert isinstance(rank.apply(AbortWeightUpdateReqInput()), Refusal) == fails
    if not fails:
        rank.assert_whole()
    assert checksum_of(rank.store) == before
    assert rank.apply(update(other)).staged
    assert checksum_of(rank.store) != before
    rank.assert_whole()


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


# ------------------------------------------------------------------------------------------------ elastic KV


def resize(**size: int) -> ResizeMemoryOccupationReqInput:
    return ResizeMemoryOccupationReqInput(**size)


def test_the_kv_cache_shrinks_and_grows_beside_streams(
    make_rank: Callable[..., Rank], undisturbed: Tokens
) -> None:
    rank, requests = make_rank(), [(prompt(seed, 40), 120) for seed in range(2)]
    rids = begin(rank, requests)
    rank.turn(8)
    before = rank.vm.taken_bytes
    reply = rank.apply(resize(num_tokens=3 * 256))
    assert (reply.changed, reply.num_tokens, reply.num_bytes, reply.moved_bytes, reply.num_retracted) == (
        *(True, 3 * 256, 3 * CHUNK, -5 * CHUNK),
        0,
    )
    assert rank.vm.taken_bytes == before - 5 * CHUNK
    rank.turn(8)
    again = rank.apply(resize(num_bytes=6 * CHUNK + 100))
    assert (again.num_tokens, again.moved_bytes) == (6 * 256, 3 * CHUNK)
    assert not rank.apply(resize(num_tokens=6 * 256)).changed
    rank.apply(resize(num_tokens=NUM_KV_CHUNKS * 256))
    rank.run()
    assert told(rank, rids) == undisturbed(requests)
    rank.assert_whole()


def test_a_pool_grows_where_there_is_memory_and_a_release_leaves_its_size(
    make_rank: Callable[..., Rank],
) -> None:
    rank = make_rank()
    rank.apply(resize(num_tokens=4 * 256))
    budget_bytes, rank.vm.budget_bytes = rank.vm.budget_bytes, rank.vm.taken_bytes + CHUNK
    reply = rank.apply(resize(num_tokens=NUM_KV_CHUNKS * 256))
    assert (reply.status, rank.kv.resident_bytes) == (409, 4 * CHUNK)
    rank.apply(ReleaseMemoryOccupationReqInput(tags=KV))
    assert rank.apply(resize(num_tokens=5 * 256)).status == 409
    assert rank.apply(ResumeMemoryOccupationReqInput(tags=KV)).mapped_bytes == {MemoryTag.KV_CACHE: 4 * CHUNK}
    rank.vm.budget_bytes = budget_bytes
    assert rank.apply(resize(num_tokens=NUM_KV_CHUNKS * 256)).moved_bytes == 4 * CHUNK
    rank.assert_whole()
