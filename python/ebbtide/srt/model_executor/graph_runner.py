"""Decode steps as CUDA graphs, by family and batch size, all in one scratch arena.

A graph reads its inputs at fixed addresses and computes the final hidden states; logits and sampling follow
as ordinary launches, since they depend on what the requests ask for. Addresses of weights, KV and scratch do
not change when their memory is released and resumed or when handles are swapped: graphs outlive all that.

Shapes: B batch size of a graph, R requests of a step, D hidden.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ebbtide.srt.layers.attention.base import (
    AttentionBackend,
    AttentionStep,
    CapturedAttention,
    DecodeBuffers,
    Progress,
    no_progress,
)
from ebbtide.srt.layers.attention.shared_runs import SharedRuns
from ebbtide.srt.layers.state import StateStep
from ebbtide.srt.memory_saver.arena import Arena
from ebbtide.srt.memory_saver.graph_pool import GraphPool
from ebbtide.srt.model_executor.batch_plan import BatchPlan
from ebbtide.srt.model_executor.forward_batch import BatchLayout, resolve_tokens

logger = logging.getLogger(__name__)

_cuda: Any = torch.cuda  # not all of it has types

# Scratch beyond what the largest batch takes when it runs without a graph, and the outputs of all graphs.
SCRATCH_MARGIN_BYTES = 64 << 20


class DecodeInputs:
    """The inputs of all graphs at fixed addresses; a graph of size B reads the first B of each.

    Args:
        max_batch_size: of the largest graph.
        max_pages: page ids of all requests of a step together.
        padding_row: a page row that no request has.
        num_groups: of layers, each of which has slots and page ids of its own.
    """

    def __init__(
        self, max_batch_size: int, max_pages: int, padding_row: int, num_groups: int, device: torch.device
    ) -> None:
        self._padding_row, self._num_groups = padding_row, num_groups
        wide, narrow = 8 * max_batch_size, 4 * (max_batch_size + 2 + max_batch_size % 2)
        narrows = [narrow] * 3
        sizes = [wide, wide, wide, *[wide] * num_groups, *narrows, *[4 * max_pages] * num_groups]
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        self._starts = starts
        self._memory = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)

        def view(index: int, dtype: torch.dtype, count: int) -> Tensor:
            return self._memory[starts[index] : starts[index] + count * dtype.itemsize].view(dtype)

        self.input_ids = view(0, torch.int64, max_batch_size)
        self.rows = view(1, torch.int64, max_batch_size)
        self.positions = view(2, torch.int64, max_batch_size)
        slots = [view(3 + group, torch.int64, max_batch_size) for group in range(num_groups)]
        lens = 3 + num_groups
        self.adapters = view(lens + 2, torch.int32, max_batch_size)
        first = lens + len(narrows)
        indices = [view(first + group, torch.int32, max_pages) for group in range(num_groups)]
        self.buffers = DecodeBuffers(
            slots_B=slots[0],
            last_page_len_B=view(lens, torch.int32, max_batch_size),
            kv_indptr_B1=view(lens + 1, torch.int32, max_batch_size + 1),
            kv_indices=indices[0],
            others=list(zip(slots[1:], indices[1:], strict=True)),
        )

    def padding(self, batch_size: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Make every row padding, and return what attention plans with: page offsets and page lengths."""
        empty = np.zeros(0, dtype=np.int64)
        none = np.zeros(0, dtype=np.int32)
        layout = BatchLayout(
            positions_T=empty,
            slots_GT=[empty] * self._num_groups,
            lens_R=none,
            page_table_GRP=[none.reshape(0, 0)] * self._num_groups,
            kv_indices_GI=[none] * self._num_groups,
            kv_indptr_R1=np.zeros(1, dtype=np.int32),
            last_page_len_R=none,
        )
        return self._fill(batch_size, empty, empty, none, layout)

    def fill(
        self, batch_size: int, plan: BatchPlan, layout: BatchLayout
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Send a step's inputs, padded to the graph's size; returns what attention plans with."""
        adapters_R = plan.adapters_R if plan.adapters_R is not None else np.zeros(0, dtype=np.int32)
        rows_R = plan.page_rows_R.astype(np.int64)
        return self._fill(batch_size, plan.input_ids_T, rows_R, adapters_R, layout)

    def _fill(
        self,
        batch_size: int,
        input_ids_R: NDArray[np.int64],
        rows_R: NDArray[np.int64],
        adapters_R: NDArray[np.int32],
        layout: BatchLayout,
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        num_padding = batch_size - len(input_ids_R)
        # A padding row attends to one token of page 0, whatever it holds, and writes nothing.
        indptr = layout.kv_indptr_R1
        indptr = np.concatenate([indptr, indptr[-1] + np.arange(1, num_padding + 1, dtype=np.int32)])
        last_page_len = _padded(layout.last_page_len_R, num_padding, 1)
        indices = [_padded(of_group, num_padding, 0) for of_group in layout.kv_indices_GI]
        arrays = (
            _padded(input_ids_R, num_padding, 0),
            _padded(rows_R, num_padding, self._padding_row),
            _padded(layout.positions_T, num_padding, 0),
            *(_padded(slots_T, num_padding, -1) for slots_T in layout.slots_GT),
            last_page_len,
            indptr,
            _padded(adapters_R, batch_size - len(adapters_R), -1),
        )
        num_bytes, end = indices[0].nbytes, self._starts[len(arrays)]
        host = torch.empty(end + num_bytes * len(indices), dtype=torch.uint8, pin_memory=True)
        places = [end + num_bytes * group for group in range(len(indices))]
        memory = host.numpy()
        for place, array in zip([*self._starts[: len(arrays)], *places], [*arrays, *indices], strict=True):
            memory[place : place + array.nbytes].view(array.dtype)[:] = array
        # Those of the first group lie right behind the rest; room for more than there are stays as it is.
        self._memory[: end + num_bytes].copy_(host[: end + num_bytes], non_blocking=True)
        for start, place in zip(self._starts[len(arrays) + 1 :], places[1:], strict=True):
            self._memory[start : start + num_bytes].copy_(host[place : place + num_bytes], non_blocking=True)
        return indptr, last_page_len


class _Captured:
    """A decode step of one batch size: its attention, and once it is captured, its graph.

    Args:
        has_adapters: whether requests may have adapters in it.
    """

    def __init__(self, size: int, attention: CapturedAttention, *, has_adapters: bool) -> None:
        self.size, self.attention, self.has_adapters = size, attention, has_adapters
        self.graph: Any = None
        self.hidden_BD: Tensor | None = None

    def discard(self) -> None:
        if self.graph is not None:
            self.graph.reset()
        self.graph = self.hidden_BD = None


class DecodeGraphs:
    """Captured decode steps.

    Args:
        forward: final hidden states, from token ids, positions, attention and states of a pass, and the slots
            of adapters where tokens may have any.
        states: of each layer with one, see `StateStep`; None: there are none.
        attention: a backend that can be captured.
        make_arena: a resident arena of at least this size, for the tag `cuda_graph`.
        batch_sizes: to capture, ascending.
        next_tokens: int64, the token sampled last for each page row; the last row is padding.
        max_pages, num_groups: see `DecodeInputs`.
        progress: called before each capture.
        with_adapters: whether steps in which requests have adapters are captured too.

    Raises:
        OutOfDeviceMemory, torch.OutOfMemoryError: there is no room for the scratch memory.
    """

    def __init__(
        self,
        forward: Callable[[Tensor, Tensor, AttentionStep, StateStep | None, Tensor | None], Tensor],
        attention: AttentionBackend,
        make_arena: Callable[[int], Arena],
        batch_sizes: Sequence[int],
        next_tokens: Tensor,
        max_pages: int,
        num_groups: int,
        states: Sequence[tuple[Tensor, ...]] | None = None,
        progress: Progress = no_progress,
        *,
        with_adapters: bool = False,
    ) -> None:
        self._states = states
        self._progress = progress
        self._forward_pass = forward
        self._next_tokens = next_tokens
        device = next_tokens.device
        padding_row = len(next_tokens) - 1
        self.inputs = DecodeInputs(batch_sizes[-1], max_pages, padding_row, num_groups, device)
        buffers = self.inputs.buffers
        self._families = []
        for family in attention.graph_families(batch_sizes):
            sizes = [(size, family.capture(size, buffers)) for size in family.sizes]
            for has_adapters in (False, True) if with_adapters else (False,):
                captured = [_Captured(*each, has_adapters=has_adapters) for each in sizes]
                self._families.append((family, has_adapters, captured))
        self._largest = batch_sizes[-1]
        started = time.monotonic()
        stream = _cuda.Stream(device)
        stream.wait_stream(_cuda.current_stream(device))
        with _cuda.stream(stream):
            num_bytes = self._warm_up() + SCRATCH_MARGIN_BYTES
            self.arena, self._pool = capture_with_room(
                make_arena, num_bytes, self._capture_all, self._discard
            )
        _cuda.current_stream(device).wait_stream(stream)
        self._pool.trim()
        logger.info(
            "CUDA graphs: batch_sizes=%d..%d graphs=%s scratch_bytes=%d s=%.1f",
            batch_sizes[0],
            batch_sizes[-1],
            {
                f"{family.name}{'+adapters' if has_adapters else ''}": len(captured)
                for family, has_adapters, captured in self._families
            },
            self.arena.num_bytes,
            time.monotonic() - started,
        )

    def fits(self, plan: BatchPlan) -> bool:
        """Whether a step can be replayed: every request adds one token and samples, and there is a graph.
        Graphs have the experts that routers choose.

        Without the scratch memory, which the device may have had no room to bring back, none can.
        """
        is_plain = plan.is_decode and not plan.given_routes
        return self.arena.is_resident and is_plain and len(plan.specs) <= self._largest

    def can_share(self, plan: BatchPlan) -> bool:
        """Whether there is a graph for a step of this size whose requests share pages."""
        return any(
            family.shares and family.sizes and family.sizes[0] <= 2 * len(plan.specs)
            for family, *_ in self._families
        )

    def replay(self, plan: BatchPlan, layout: BatchLayout, runs: SharedRuns | None = None) -> Tensor:
        """Launch a step; final hidden states [R, D], good until the next replay.

        Args:
            runs: who shares which pages, if the step `can_share`.
        """
        num_requests = len(plan.specs)
        captured = self._choose(num_requests, layout, runs, has_adapters=plan.adapters_R is not None)
        captured.attention.plan(*self.inputs.fill(captured.size, plan, layout), runs)
        captured.graph.replay()
        assert captured.hidden_BD is not None
        return captured.hidden_BD[:num_requests]

    def _choose(
        self, num_requests: int, layout: BatchLayout, runs: SharedRuns | None, *, has_adapters: bool
    ) -> _Captured:
        """The graph of the first family that suits the step: the smallest that takes the requests."""
        for family, takes_adapters, captured in self._families:
            place = bisect_left(family.sizes, num_requests)
            if takes_adapters != has_adapters or place == len(captured):
                continue
            if (family.shares and runs is not None) or family.suits(layout.lens_R, family.sizes[place]):
                return captured[place]
        raise AssertionError(f"no graph takes {num_requests} requests: `fits` was not asked")

    @property
    def _by_size(self) -> list[_Captured]:
        """The largest first: the smaller ones find room in what it leaves."""
        graphs = (one for *_, captured in self._families for one in captured)
        return sorted(graphs, key=lambda one: -one.size)

    def _warm_up(self) -> int:
        """Run every size once, so that kernels are compiled and workspaces made.

        Returns:
            Bytes of scratch that it took: the most that one size takes, and what the graphs will keep.
        """
        device = self._next_tokens.device
        _cuda.reset_peak_memory_stats(device)
        before = _cuda.memory_allocated(device)
        peak, kept = 0, 0
        for captured in self._by_size:
            self._prepare(captured)
            kept += self._forward(captured).nbytes
            peak = max(peak, _cuda.max_memory_allocated(device) - before)
        _cuda.synchronize(device)
        return int(peak) + kept

    def _capture_all(self, pool: GraphPool) -> None:
        graphs = [*self._by_size]
        for number, captured in enumerate(graphs):
            self._progress("capturing CUDA graphs", number, len(graphs))
            self._capture(captured, pool)

    def _capture(self, captured: _Captured, pool: GraphPool) -> None:
        self._prepare(captured)
        graph = _cuda.CUDAGraph()
        # Other threads may go on with their own CUDA calls meanwhile.
        graph.capture_begin(pool=pool.id, capture_error_mode="thread_local")
        captured.graph = graph
        try:
            captured.hidden_BD = self._forward(captured)
        finally:
            graph.capture_end()

    def _discard(self) -> None:
        """Give up what was captured so far, and with it all memory of the pool."""
        for captured in self._by_size:
            captured.discard()

    def _prepare(self, captured: _Captured) -> None:
        captured.attention.plan(*self.inputs.padding(captured.size))

    def _forward(self, captured: _Captured) -> Tensor:
        inputs, size = self.inputs, captured.size
        input_ids_B = resolve_tokens(inputs.input_ids[:size], inputs.rows[:size], self._next_tokens)
        states = None if self._states is None else StateStep(self._states, inputs.rows[:size], size)
        slots_B = inputs.adapters[:size] if captured.has_adapters else None
        return self._forward_pass(input_ids_B, inputs.positions[:size], captured.attention, states, slots_B)


def capture_with_room(
    make_arena: Callable[[int], Arena],
    num_bytes: int,
    capture: Callable[[GraphPool], None],
    discard: Callable[[], None],
    make_pool: Callable[[Arena], GraphPool] = GraphPool,
) -> tuple[Arena, GraphPool]:
    """Capture in an arena of `num_bytes`, doubled as often as that is too little.

    Args:
        capture: raises torch.OutOfMemoryError where the pool is too small.
        discard: gives up everything that `capture` took from the pool.

    Raises OutOfDeviceMemory where the device has no room for the next arena.
    """
    while True:
        arena = make_arena(num_bytes)
        pool = make_pool(arena)
        try:
            capture(pool)
        except torch.OutOfMemoryError:
            logger.info("CUDA graphs need more than %d bytes of scratch, and are captured again", num_bytes)
        else:
            return arena, pool
        # The error is gone by now, and with it the frames that held tensors of the pool.
        discard()
        pool.close()
        arena.close()
        num_bytes *= 2


def _padded(array: NDArray[Any], num_padding: int, value: int) -> NDArray[Any]:
    return np.concatenate([array, np.full(num_padding, value, dtype=array.dtype)])
