"""A model's kernels, compiled and loaded before the first pass needs one of them.

Passes are gone through on numbers that mean nothing. Attention is left out but for what all backends launch;
a backend compiles its own. In `rehearse` nothing of Triton's is launched: each kernel is compiled in a thread
instead, and passes of other sizes follow meanwhile. In `load_kernels` everything runs.

Shapes: T tokens, M rows that are wanted, N query heads, K KV heads, H head_dim.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.nn import ModuleList

from ebbtide.srt.distributed.parallel_group import ParallelGroup
from ebbtide.srt.layers.attention.base import AttentionShape, DecodeBuffers, LayerAttention, Progress
from ebbtide.srt.layers.attention.decode_choice import FewRequests, serves_few
from ebbtide.srt.layers.heads import HeadNorms, Rope
from ebbtide.srt.layers.lora import StepAdapters
from ebbtide.srt.layers.state import PIECE_TOKENS, StateLayer, StateStep
from ebbtide.srt.layers.step import Kernels, Step
from ebbtide.srt.mem_cache import State
from ebbtide.srt.mem_cache.kv_pool import StateLayout
from ebbtide.srt.model_executor.sampling.sampler import Sampler
from ebbtide.srt.models.base import CausalLM

logger = logging.getLogger(__name__)

# A product of at most 64 rows takes a kernel that is chosen by their power of two.
_FEW_ROWS = (1, 2, 4, 8, 16, 32, 64)
# Of prompts whose last tokens are such rows.
_PROMPT_TOKENS = 256
# Numbers of tokens for which kernels of adapters cut their sums differently.
_PROMPTS_WITH_ADAPTERS = (16, 32, 64, 128, 320, 640, 1088, 3072, 8192)
# cuBLAS has other kernels for multiples of 8 rows than for the numbers between them.
_ALIGNED_ROWS = 8
# Up to here each of these multiples may have a kernel of its own, and the rows that follow it another one.
# For more rows steps of 3 % come upon all kernels but few (all by the products of Llama-3.1-8B on an H200).
_EACH_UP_TO = 1024
_STEP = 0.03


def rehearse(
    model: CausalLM,
    kernels: Kernels,
    sampler: Sampler,
    shape: AttentionShape,
    decode_sizes: Sequence[int],
    prompt_lens: Sequence[int],
    device: torch.device,
    progress: Progress,
    num_slots: int | None = None,
) -> None:
    """Have every Triton kernel of these passes compiled, or loaded from Triton's cache.

    Args:
        model: with its weights resident; whether they hold anything does not matter.
        decode_sizes: tokens of passes in which every token is sampled after. Powers of two stand for those
            between them.
        prompt_lens: tokens of passes in which the last one is.
        progress: called with "kernels", how many are compiled or loaded, and how many there are so far.
        num_slots: of adapters; None: no pass has any.
    """
    started = time.monotonic()
    with (
        ThreadPoolExecutor(os.cpu_count()) as threads,
        compiling_only(_Counted(threads, progress)),
        _apart(model),
        torch.inference_mode(),
    ):
        for num_tokens in _representative(decode_sizes):
            _pass(model, kernels, shape, device, num_tokens)
            if num_slots is not None:
                _pass(model, kernels, shape, device, num_tokens, num_slots=num_slots)
        for num_tokens in _PROMPTS_WITH_ADAPTERS if num_slots is not None else ():
            _pass(model, kernels, shape, device, num_tokens, num_slots=num_slots)
        for num_tokens in prompt_lens:
            _pass(model, kernels, shape, device, num_tokens, num_rows=1)
        for num_rows in _FEW_ROWS:
            model.logits(_pass(model, kernels, shape, device, _PROMPT_TOKENS, num_rows), kernels)
        sampler.warm_up(shape.dtype)
        walked_s = time.monotonic() - started
    logger.info("kernels: walked_s=%.1f s=%.1f", walked_s, time.monotonic() - started)


def load_kernels(
    model: CausalLM,
    kernels: Kernels,
    shape: AttentionShape,
    max_tokens: int,
    max_rows: int,
    device: torch.device,
) -> None:
    """Launch what libraries and Triton have for passes of up to `max_tokens` tokens.

    The driver loads a kernel when it is launched first, and waits for the device to be idle then. Libraries
    have other kernels for other numbers of rows: without this, one pass in three was held up by the one
    before it in the first ten seconds of 1,024 streams on an H200.

    Args:
        model: with its weights resident.
        max_tokens: of a pass.
        max_rows: of them, those that are sampled after.
    """
    with _apart(model), _one_layer_of_each_kind(model), torch.inference_mode():
        # The largest comes first: torch's allocator then has memory for all others.
        for num_tokens in _sizes(max_tokens):
            hidden_TD = _pass(model, kernels, shape, device, num_tokens)
            if num_tokens <= max_rows:
                model.logits(hidden_TD, kernels)
        for num_rows in _FEW_ROWS:
            model.logits(_pass(model, kernels, shape, device, _PROMPT_TOKENS, num_rows), kernels)


def _sizes(most: int) -> Iterator[int]:
    """Numbers of rows for which libraries may have other kernels, in descending order."""
    size = most - most % _ALIGNED_ROWS
    while size >= _FEW_ROWS[-1]:
        yield size + 1
        yield size
        step = 0 if size <= _EACH_UP_TO else int(size * _STEP)
        size -= max(_ALIGNED_ROWS, step - step % _ALIGNED_ROWS)


def _pass(
    model: CausalLM,
    kernels: Kernels,
    shape: AttentionShape,
    device: torch.device,
    num_tokens: int,
    num_rows: int | None = None,
    num_slots: int | None = None,
) -> Tensor:
    """Hidden states of `num_rows` rows; None: of all.

    Args:
        num_slots: of adapters, which all tokens have then.
    """
    zeros_T = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    wanted_M = None if num_rows is None else zeros_T[:num_rows]
    step = Step(
        zeros_T,
        zeros_T,
        _WithoutAttention(shape, num_tokens, device),
        kernels,
        wanted_M,
        states=_states(model, zeros_T, is_prompt=num_rows is not None),
        adapters=None if num_slots is None else StepAdapters.of(zeros_T.int(), num_slots),
    )
    return model.forward(step)


def _states(model: CausalLM, zeros_T: Tensor, *, is_prompt: bool) -> StateStep | None:
    """Requests that share a slot: one prompt, or all of one token."""
    specs = [spec for spec in model.cache_specs if isinstance(spec, State)]
    if not specs:
        return None
    num_tokens, device = len(zeros_T), zeros_T.device
    num_ranks = next(layer.group.size for layer in model.modules() if isinstance(layer, StateLayer))
    layers = [
        tuple(torch.zeros((1, *shape), dtype=dtype, device=device) for shape, dtype in parts)
        for parts in StateLayout.of(specs, num_ranks, 1).parts
    ]
    if not is_prompt:
        return StateStep(layers, zeros_T, num_tokens)
    indptr, pieces = (
        torch.tensor(numbers, dtype=torch.int32, device=device)
        for numbers in ([0, num_tokens], [(0, min(PIECE_TOKENS, num_tokens), 0)])
    )
    return StateStep(layers, zeros_T[:1], 0, indptr, [num_tokens], pieces)


@contextmanager
def _one_layer_of_each_kind(model: CausalLM) -> Iterator[None]:
    """Layers whose parameters have other shapes are of other kinds. All stay where none are found."""
    decoders = (part for part in model.modules() if isinstance(getattr(part, "layers", None), ModuleList))
    decoder: Any = next(decoders, None)
    if decoder is None:
        yield
        return
    whole = decoder.layers
    kinds = {tuple((name, each.shape) for name, each in layer.named_parameters()): layer for layer in whole}
    decoder.layers = ModuleList(kinds.values())
    try:
        yield
    finally:
        decoder.layers = whole


def _representative(sizes: Sequence[int]) -> list[int]:
    """The powers of two among them and the largest: tiles are chosen by such bounds."""
    return [size for size in sizes if size & (size - 1) == 0 or size == sizes[-1]]


@contextmanager
def _apart(model: CausalLM) -> Iterator[None]:
    """The layers' ranks do without one another: nothing is summed or gathered."""
    layers: list[Any] = [layer for layer in model.modules() if hasattr(layer, "group")]
    groups = [layer.group for layer in layers]
    for layer, group in zip(layers, groups, strict=True):
        layer.group = ParallelGroup(group.size, group.rank)
    try:
        yield
    finally:
        for layer, group in zip(layers, groups, strict=True):
            layer.group = group


class _WithoutAttention:
    """What a layer does with its queries, keys and values in Triton; nothing is kept."""

    def __init__(self, shape: AttentionShape, num_tokens: int, device: torch.device) -> None:
        size = (1, shape.page_size, shape.num_kv_heads, shape.head_dim)
        self._page = torch.empty(size, dtype=shape.kv_dtype, device=device)
        self._latent = shape.latent
        self._nowhere_T = torch.full((num_tokens,), -1, dtype=torch.int64, device=device)
        self._few: FewRequests | None = None
        if serves_few(shape, num_tokens):
            no_pages = torch.zeros(num_tokens + 1, dtype=torch.int32, device=device)
            buffers = DecodeBuffers(self._nowhere_T, no_pages, no_pages, no_pages)
            self._few = FewRequests(self, shape, num_tokens, buffers)

    def k(self, layer: int) -> Tensor:
        return self._page

    v = k

    def group(self, layer: int) -> int:
        return 0

    def head_scales(self, layer: int) -> None:
        return None

    def forward(self, layer: LayerAttention, qkv_TNH: Tensor, rope: Rope, norms: HeadNorms | None) -> Tensor:
        from ebbtide.srt.layers.kernels.rope import rotate_and_store

        if self._latent is not None:
            from ebbtide.srt.layers.kernels.latent import rotate_and_store_latents

            q_TNH = rotate_and_store_latents(qkv_TNH, rope, self._nowhere_T, self._page)
            return q_TNH.new_zeros(*q_TNH.shape[:2], self._latent.rank)
        if self._few is not None:
            self._few.forward(layer, qkv_TNH, rope, norms)
        q_TNH = rotate_and_store(qkv_TNH, rope, norms, self._nowhere_T, self._page, self._page)
        return torch.zeros_like(q_TNH)


class _Counted(Executor):
    """Says after each task how many are done."""

    def __init__(self, threads: Executor, progress: Progress) -> None:
        self._threads, self._progress = threads, progress
        self._num_given = self._num_done = 0
        self._lock = Lock()

    def submit(self, task: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        with self._lock:
            self._num_given += 1
        future = self._threads.submit(task, *args, **kwargs)
        future.add_done_callback(self._count)
        return future

    def _count(self, future: Future[Any]) -> None:
        with self._lock:
            self._num_done += 1
            self._progress("kernels", self._num_done, self._num_given)


@contextmanager
def compiling_only(executor: Executor, *, ignore_errors: bool = False) -> Iterator[None]:
    """What this process launches of Triton's or of NVRTC's is compiled in the executor and does not run."""
    import triton
    from triton.runtime.jit import JITFunction

    from ebbtide.srt.layers.kernels.nvrtc import compiling_ahead

    launch: Any = JITFunction.run

    def compile_alone(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return launch(kernel, *args, grid=grid, warmup=True, **options)

    JITFunction.run = compile_alone
    try:
        with triton.AsyncCompileMode(executor, ignore_errors=ignore_errors), compiling_ahead(executor):
            yield
    finally:
        JITFunction.run = launch
