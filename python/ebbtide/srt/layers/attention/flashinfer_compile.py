"""Compiling what FlashInfer's attention needs before it is needed.

FlashInfer's modules are kept in `kernel_cache.flashinfer_cache_dir()`, Triton's kernels in
`kernel_cache.triton_cache_dir()`: the next start finds them there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ebbtide.srt.errors import ConfigurationError
from ebbtide.srt.kernel_cache import add_scripts_to_path
from ebbtide.srt.layers.attention.base import AttentionShape, Progress
from ebbtide.srt.layers.attention.flashinfer_kernels import module_specs
from ebbtide.srt.layers.heads import HeadNorms
from ebbtide.srt.layers.rotary import RopeConfig, RotaryEmbedding

# What is quoted of a compiler's output, which repeats commands of thousands of characters.
_MAX_LINES, _MAX_LINE_CHARS = 20, 300


def compile_kernels(shape: AttentionShape, device: torch.device, progress: Progress) -> None:
    """Compile the attention kernels of a model that are not in the caches yet.

    Args:
        shape: heads and pages of the model, and the dtype of its activations and its KV cache.
        device: the GPU to compile for.
        progress: called before each step, e.g. with ("compiling decode attention", 1, 3).
            Where everything is in the caches nothing is said to be compiled.

    Raises:
        ConfigurationError: FlashInfer's compiler fails; the message ends with the last of its output.
    """
    add_scripts_to_path()
    steps: dict[str, Callable[[], None]] = {}
    for use, spec in module_specs(shape, device).items():
        if not (spec.is_aot or spec.is_compiled):
            steps[f"compiling {use}"] = partial(_build, use, spec)
    # Triton does not say what its cache holds. What is there is loaded at once.
    steps["loading rotation and activation"] = partial(_run_small_kernels, shape, device)
    for number, (name, step) in enumerate(steps.items(), start=1):
        progress(name, number, len(steps))
        step()


def _build(use: str, spec: Any) -> None:
    try:
        spec.build(verbose=False)
    except (RuntimeError, OSError) as error:
        lines = [line.rstrip()[:_MAX_LINE_CHARS] for line in str(error).splitlines() if line.strip()]
        output = "\n".join(lines[-_MAX_LINES:])
        raise ConfigurationError(
            f"FlashInfer could not compile the kernels of {use}; attention_backend=torch_native works "
            f"without them, attention_backend=triton too. The end of the compiler's output:\n{output}"
        ) from error


def _run_small_kernels(shape: AttentionShape, device: torch.device) -> None:
    """Launch the Triton kernels for one token and for many: they are compiled for each kind of grid."""
    from ebbtide.srt.layers.activation import gated
    from ebbtide.srt.layers.kernels.rope import MANY_TOKENS, rotate_and_store

    heads, dim = (shape.num_q_heads + 2 * shape.num_kv_heads, shape.head_dim)
    rotary = RotaryEmbedding(RopeConfig("default", 10_000.0), dim, device)
    page = torch.empty((1, shape.page_size, shape.num_kv_heads, dim), dtype=shape.kv_dtype, device=device)
    weight = torch.ones(dim, dtype=shape.dtype, device=device)
    for num_tokens in (1, MANY_TOKENS):
        rope = rotary(torch.zeros(num_tokens, dtype=torch.int64, device=device), shape.dtype)
        qkv_TNH = torch.zeros((num_tokens, heads, dim), dtype=shape.dtype, device=device)
        nowhere_T = torch.full((num_tokens,), -1, dtype=torch.int64, device=device)
        for norms in (None, HeadNorms(weight, weight, 1e-6)):
            rotate_and_store(qkv_TNH, rope, norms, nowhere_T, page, page)
    gated(torch.zeros((1, 2 * dim), dtype=shape.dtype, device=device))
