"""Any sequence of resume, release, stage, write, copy, swap and close does to tensors as to plain bytes."""

import torch
from fixtures.fuzz import fuzzed
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ebbtide.srt.memory_saver.arena import Arena
from ebbtide.srt.memory_saver.tags import MemoryTag
from ebbtide.srt.memory_saver.virtual_arena import VirtualArena
from ebbtide.srt.memory_saver.virtual_memory.host import HostVirtualMemory

GRANULE = HostVirtualMemory.granularity
NUM_BYTES = 3 * GRANULE - 100
# Windows at both ends, across both chunk borders, and within a chunk: what the model of plain bytes covers.
WINDOW = 64
OFFSETS = (0, GRANULE - 32, 2 * GRANULE - 32, 2 * GRANULE + 4096, NUM_BYTES - WINDOW)
MAX_SHADOWS = 2

windows = st.integers(0, len(OFFSETS) - 1)
values = st.integers(0, 255)


def zeros() -> list[bytes]:
    return [bytes(WINDOW) for _ in OFFSETS]


class ArenaStates(RuleBasedStateMachine):
    """The arena, its shadows, and beside each the bytes that it should hold."""

    @initialize(chunk_bytes=st.sampled_from([None, 1, GRANULE, 2 * GRANULE]))
    def make(self, chunk_bytes: int | None) -> None:
        self.arena = VirtualArena(MemoryTag.WEIGHTS, NUM_BYTES, HostVirtualMemory(), chunk_bytes)
        self.views = [self.arena.view(offset, (WINDOW,), torch.uint8) for offset in OFFSETS]
        self.pointers = [view.data_ptr() for view in self.views]
        self.expected: list[bytes] | None = None
        self.shadows: list[tuple[Arena, list[bytes]]] = []

    @rule()
    def resume(self) -> None:
        assert self.arena.resume() == (self.arena.virtual_bytes if self.expected is None else 0)
        if self.expected is None:
            self.expected = zeros()

    @rule()
    def release(self) -> None:
        assert self.arena.release() == (self.arena.virtual_bytes if self.expected is not None else 0)
        self.expected = None

    @precondition(lambda self: self.expected is not None)
    @rule(window=windows, value=values)
    def write(self, window: int, value: int) -> None:
        self.views[window].fill_(value)
        self.expected[window] = bytes([value]) * WINDOW

    @precondition(lambda self: len(self.shadows) < MAX_SHADOWS)
    @rule()
    def stage(self) -> None:
        self.shadows.append((self.arena.stage(), zeros()))

    @precondition(lambda self: self.shadows)
    @rule(data=st.data(), window=windows, value=values)
    def write_to_shadow(self, data: st.DataObject, window: int, value: int) -> None:
        shadow, expected = data.draw(st.sampled_from(self.shadows))
        shadow.view(OFFSETS[window], (WINDOW,), torch.uint8).fill_(value)
        expected[window] = bytes([value]) * WINDOW

    @precondition(lambda self: self.shadows and self.expected is not None)
    @rule(data=st.data(), window=windows)
    def copy_live_bytes(self, data: st.DataObject, window: int) -> None:
        shadow, expected = data.draw(st.sampled_from(self.shadows))
        live, copy = (one.view(OFFSETS[window], (WINDOW,), torch.uint8) for one in (self.arena, shadow))
        copy.copy_(live)
        expected[window] = self.expected[window]

    @precondition(lambda self: self.shadows and self.expected is not None)
    @rule(data=st.data())
    def swap(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.shadows) - 1))
        shadow, expected = self.shadows[index]
        self.arena.swap(shadow)
        self.shadows[index] = (shadow, self.expected)
        self.expected = expected

    @precondition(lambda self: self.shadows)
    @rule()
    def close_shadow(self) -> None:
        self.shadows.pop(0)[0].close()

    @invariant()
    def tensors_hold_what_plain_bytes_would(self) -> None:
        if self.expected is not None:
            assert [bytes(view.tolist()) for view in self.views] == self.expected
        for shadow, expected in self.shadows:
            views = [shadow.view(offset, (WINDOW,), torch.uint8) for offset in OFFSETS]
            assert [bytes(view.tolist()) for view in views] == expected

    @invariant()
    def nothing_has_moved(self) -> None:
        assert [view.data_ptr() for view in self.views] == self.pointers
        assert self.arena.is_resident == (self.expected is not None)

    def teardown(self) -> None:
        for shadow, _ in self.shadows:
            shadow.close()
        self.arena.close()


TestArenaFuzz = fuzzed(ArenaStates, 25, 25)
