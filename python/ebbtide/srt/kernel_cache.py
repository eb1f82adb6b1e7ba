"""Kernels that are compiled at first use: whether that is possible here, and where they are cached."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

_PRECOMPILED = "flashinfer_jit_cache"
# Held while `JitSpec.build` is replaced.
_LOADING = Lock()


def flashinfer_problem() -> str | None:
    """Why FlashInfer cannot be used here, and what would help; None: it can be used."""
    if importlib.util.find_spec("flashinfer") is None:
        return 'FlashInfer is not installed (pip install "ebbtide[cuda]")'
    if importlib.util.find_spec(_PRECOMPILED) is not None:
        return None
    if nvcc() is None:
        return (
            "FlashInfer compiles its kernels and finds no nvcc (install the CUDA toolkit and set CUDA_HOME, "
            "or install flashinfer-jit-cache)"
        )
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        return "FlashInfer compiles its kernels and finds no C++ compiler (install g++, or set CXX)"
    if shutil.which("ninja", path=_path_with_scripts()) is None:
        return "FlashInfer compiles its kernels and finds no ninja (pip install ninja)"
    return None


def nvcc() -> Path | None:
    """The CUDA compiler that FlashInfer would call; None: there is none."""
    if (given := os.environ.get("FLASHINFER_NVCC")) is not None:
        return Path(given)
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home is None and (found := shutil.which("nvcc")) is not None:
        return Path(found)
    path = Path(home if home is not None else "/usr/local/cuda", "bin", "nvcc")
    return path if path.exists() else None


def add_scripts_to_path() -> None:
    """Let FlashInfer find the ninja that pip installed, even if the environment is not activated."""
    os.environ["PATH"] = _path_with_scripts()


def _path_with_scripts() -> str:
    scripts, path = str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)
    return path if scripts in path.split(os.pathsep) else f"{path}{os.pathsep}{scripts}"


def keep_kernels_in(folder: str | None) -> None:
    """Make all libraries of this process and its children cache kernels in a folder; None: do nothing.

    Call it before FlashInfer is imported, which reads the variable only then.
    """
    os.environ.update(kernel_variables(folder))


def kernel_variables(folder: str | None) -> dict[str, str]:
    """Environment variables that make libraries cache their kernels in a folder; None: no variables."""
    if folder is None:
        return {}
    path = Path(folder).expanduser().resolve()
    return {
        "FLASHINFER_WORKSPACE_BASE": str(path),
        "TRITON_CACHE_DIR": str(path / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(path / "inductor"),
    }


@contextmanager
def compiled_as_they_are() -> Iterator[None]:
    """Within, FlashInfer's modules that are already compiled are loaded without asking ninja.

    Ninja would compile them again if they are older than their sources, as when a folder of kernels was
    copied to a machine before FlashInfer was installed there. The folder's name has FlashInfer's version and
    the kind of GPU, so the kernels fit anyway.
    """
    from flashinfer.jit.core import JitSpec

    with _LOADING:
        build: Any = JitSpec.build

        def build_what_is_missing(spec: Any, *args: Any, **options: Any) -> None:
            if not spec.is_compiled:
                build(spec, *args, **options)

        JitSpec.build = build_what_is_missing
        try:
            yield
        finally:
            JitSpec.build = build


def flashinfer_cache_dir() -> Path:
    """The folder of FlashInfer's compiled kernels. The variable FLASHINFER_WORKSPACE_BASE moves it."""
    return Path(os.environ.get("FLASHINFER_WORKSPACE_BASE", Path.home()), ".cache", "flashinfer")
