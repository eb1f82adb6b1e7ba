"""Chunks that change places: one arena lends, the second copy of another borrows, nothing is allocated."""

import pytest
import torch
from fixtures.budgeted_memory import BudgetedMemory
from fixtures.fuzz import fuzzed
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ebbtide.srt.errors import EngineError, OutOfDeviceMemory
from ebbtide.srt.memory_saver import MemoryTag
from ebbtide.srt.memory_saver.arena import Arena
from ebbtide.srt.memory_saver.virtual_arena import ChunkPool
from ebbtide.srt.memory_saver.virtual_memory.host import HostVirtualMemory
from ebbtide.srt.slices import finish

CHUNK = HostVirtualMemory.granularity
NUM_KV, NUM_WEIGHTS = 6, 3


class Rank:
    """A KV cache of six chunks and weights of three, on a machine with room for so many chunks."""

    def __init__(self, vm, num_chunks):
        self.vm = BudgetedMemory(num_chunks * CHUNK, vm)
        self.pool = ChunkPool(self.vm, CHUNK)
        self.kv = self.pool.arena(MemoryTag.KV_CACHE, NUM_KV * CHUNK)
        self.weights = self.pool.arena(MemoryTag.WEIGHTS, NUM_WEIGHTS * CHUNK - 100)
        self.kv.resume()
        self.weights.resume()

    def fill(self, value):
        return self.weights.view(0, (self.weights.num_bytes,), torch.uint8).fill_(value)

    def close(self):
        self.kv.close()
        self.weights.close()
        assert self.vm.taken_bytes == 0


class PoolStates(RuleBasedStateMachine):
    """Any sequence of releasing, lending, staging, swapping and giving back: every byte is somewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.rank = Rank(HostVirtualMemory(), NUM_KV + 2 * NUM_WEIGHTS + 1)
        self.shadows: list[tuple[Arena, int]] = []
        self.value: int | None = 0
        self.rank.fill(0)
        self.lent: set[int] = set()

    @rule(data=st.data())
    def lend(self, data: st.DataObject) -> None:
        chunks = data.draw(st.sets(st.sampled_from(range(NUM_KV)))) - self.lent
        if self.rank.kv.is_resident:
            self.rank.kv.lend(sorted(chunks))
            self.lent |= chunks
        else:
            with pytest.raises(EngineError, match="must be resident"):
                self.rank.kv.lend(sorted(chunks))

    @rule(data=st.data())
    def take_back(self, data: st.DataObject) -> None:
        chunks = data.draw(st.sets(st.sampled_from(range(NUM_KV))))
        if len(chunks & self.lent) <= len(self.rank.pool.spare):
            self.rank.kv.take_back(sorted(chunks))
            self.lent -= chunks

    @rule(is_kv=st.booleans())
    def release(self, is_kv: bool) -> None:
        arena = self.rank.kv if is_kv else self.rank.weights
        held_bytes = arena.resident_bytes
        assert arena.release() == held_bytes
        if not is_kv:
            self.value = None

    @rule(is_kv=st.booleans())
    def resume(self, is_kv: bool) -> None:
        arena = self.rank.kv if is_kv else self.rank.weights
        was_resident, before = arena.is_resident, arena.resident_bytes
        try:
            assert arena.resume() == arena.resident_bytes - before
        except OutOfDeviceMemory:
            assert arena.resident_bytes == 0
            return
        if not is_kv and not was_resident:
            self.value = 7
            self.rank.fill(7)

    @precondition(lambda self: len(self.shadows) < 2)
    @rule(value=st.integers(0, 255))
    def stage(self, value: int) -> None:
        before = len(self.rank.pool.spare)
        try:
            shadow = finish(self.rank.weights.stage())
        except OutOfDeviceMemory:
            assert len(self.rank.pool.spare) == before
            return
        shadow.view(0, (shadow.num_bytes,), torch.uint8).fill_(value)
        self.shadows.append((shadow, value))

    @precondition(lambda self: self.shadows and self.value is not None)
    @rule()
    def swap(self) -> None:
        shadow, value = self.shadows.pop()
        self.rank.weights.swap(shadow)
        self.shadows.append((shadow, self.value))
        self.value = value

    @precondition(lambda self: self.shadows)
    @rule(by_chunks=st.booleans())
    def close_shadow(self, by_chunks: bool) -> None:
        shadow, _ = self.shadows.pop(0)
        if by_chunks:
            steps = shadow.close_by_chunks()
            next(steps)
            steps.close()
        shadow.close()

    @invariant()
    def every_byte_is_somewhere(self) -> None:
        rank, pool = self.rank, self.rank.pool
        arenas = [rank.kv, rank.weights, *(shadow for shadow, _ in self.shadows)]
        held_bytes = sum(arena.resident_bytes for arena in arenas)
        assert rank.vm.taken_bytes == held_bytes + len(pool.spare) * CHUNK
        assert len(pool.spare) <= rank.kv.num_lent == len(self.lent)
        assert pool.is_owed_more == (len(pool.spare) < len(self.lent))

    @invariant()
    def weights_hold_what_was_written(self) -> None:
        if self.value is not None:
            ends = self.rank.weights.view(0, (self.rank.weights.num_bytes,), torch.uint8)[:: CHUNK // 2]
            assert ends.unique().tolist() == [self.value]

    def teardown(self) -> None:
        for shadow, _ in self.shadows:
            shadow.close()
        self.rank.close()


TestPoolFuzz = fuzzed(PoolStates, 25, 25)
