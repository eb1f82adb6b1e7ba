"""Compiling what FlashInfer's attention needs before it is needed.

FlashInfer's modules are kept in `kernel_cache.flashinfer_cache_dir()`: the next start finds them there.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import torch

from ebbtide.srt.errors import ConfigurationError
from ebbtide.srt.kernel_cache import add_scripts_to_path
from ebbtide.srt.layers.attention.base import AttentionShape, Progress
from ebbtide.srt.layers.attention.flashinfer_kernels import module_specs

# What is quoted of a compiler's output, which repeats commands of thousands of characters.
_MAX_LINES, _MAX_LINE_CHARS = 20, 300


def compile_kernels(shape: AttentionShape, device: torch.device, progress: Progress, *, whole: bool) -> None:
    """Compile the attention kernels of a model that are not in the cache yet, all modules at once.

    Args:
        shape: heads and pages of the model, and the dtype of its activations and its KV cache.
        device: the GPU to compile for.
        progress: called when it begins and after each module, e.g. with ("compiling attention", 1, 2).
            Where everything is in the cache it is not called.
        whole: false: what a start waits for; see `module_specs`.

    Raises:
        ConfigurationError: FlashInfer's compiler fails; the message ends with the last of its output.
    """
    add_scripts_to_path()
    missing = {
        use: spec
        for use, spec in module_specs(shape, device, whole=whole).items()
        if not (spec.is_aot or spec.is_compiled)
    }
    if not missing:
        return
    progress("compiling attention", 0, len(missing))
    with ThreadPoolExecutor(len(missing)) as threads:
        builds = [threads.submit(_build, use, spec) for use, spec in missing.items()]
        for number, build in enumerate(as_completed(builds), start=1):
            build.result()
            progress("compiling attention", number, len(missing))


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
