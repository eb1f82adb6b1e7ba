"""A model's Triton kernels, compiled side by side before the first pass needs one of them.

A pass is gone through with nothing of Triton's launched: each kernel that it would launch is compiled in a
thread instead, and passes of other sizes follow meanwhile. What torch launches runs, on numbers that mean
nothing. Attention is left out but for what all backends launch; a backend compiles its own.

Shapes: T tokens, N query heads, K KV heads, H head_dim.
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

from ebbtide.srt.distributed.parallel_group import LoneRank
from ebbtide.srt.layers.attention.base import AttentionShape, LayerAttention, Progress
from ebbtide.srt.layers.attention.few_requests import FewRequests, serves_few
from ebbtide.srt.layers.attention.paged_kernel import DevicePages
from ebbtide.srt.layers.heads import HeadNorms, Rope
from ebbtide.srt.model_executor.sampling.sampler import Sampler
from ebbtide.srt.models.base import CausalLM

logger = logging.getLogger(__name__)


def rehearse(
    model: CausalLM,
    sampler: Sampler,
    shape: AttentionShape,
    decode_sizes: Sequence[int],
    prompt_lens: Sequence[int],
    device: torch.device,
    progress: Progress,
) -> None:
    """Have every Triton kernel of these passes compiled, or loaded from Triton's cache.

    Args:
        model: with its weights resident; whether they hold anything does not matter.
        decode_sizes: tokens of passes in which every token is sampled after. Powers of two stand for those
            between them.
        prompt_lens: tokens of passes in which the last one is.
        progress: called with "kernels", how many are compiled or loaded, and how many there are so far.
    """
    started = time.monotonic()
    with (
        ThreadPoolExecutor(os.cpu_count()) as threads,
        compiling_only(_Counted(threads, progress)),
        _apart(model),
        torch.inference_mode(),
    ):
        for num_tokens in (*_telling(decode_sizes), *prompt_lens):
            zeros_T = torch.zeros(num_tokens, dtype=torch.int64, device=device)
            rows_S = zeros_T[:1] if num_tokens in prompt_lens else None
            model.forward(zeros_T, zeros_T, _WithoutAttention(shape, num_tokens, device), rows_S)
        sampler.warm_up(shape.dtype)
        walked_s = time.monotonic() - started
    logger.info("kernels: walked_s=%.1f s=%.1f", walked_s, time.monotonic() - started)


def _telling(sizes: Sequence[int]) -> list[int]:
    """The powers of two among them and the largest: tiles are chosen by such bounds."""
    return [size for size in sizes if size & (size - 1) == 0 or size == sizes[-1]]


@contextmanager
def _apart(model: CausalLM) -> Iterator[None]:
    """The layers' ranks do without one another: nothing is summed or gathered."""
    layers: list[Any] = [layer for layer in model.modules() if hasattr(layer, "group")]
    groups = [layer.group for layer in layers]
    for layer, group in zip(layers, groups, strict=True):
        layer.group = LoneRank(group.size, group.rank)
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
        self._nowhere_T = torch.full((num_tokens,), -1, dtype=torch.int64, device=device)
        self._few: FewRequests | None = None
        if serves_few(shape, num_tokens):
            numbers = torch.zeros(num_tokens + 1, dtype=torch.int32, device=device)
            self._few = FewRequests(shape, DevicePages(numbers, numbers, numbers, numbers[:num_tokens]))

    def forward(self, layer: LayerAttention, qkv_TNH: Tensor, rope: Rope, norms: HeadNorms | None) -> Tensor:
        from ebbtide.srt.layers.kernels.rope import rotate_and_store

        if self._few is not None:
            self._few.attend(layer.kind, qkv_TNH, rope, norms, self._nowhere_T, self._page, self._page)
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
