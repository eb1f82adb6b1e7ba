"""Kernels that are compiled at first use: whether they can be, and where the results are kept."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

_PRECOMPILED = "flashinfer_jit_cache"


def flashinfer_problem() -> str | None:
    """Why FlashInfer cannot be used here, and what would help; None if nothing is in the way."""
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
    """The compiler that FlashInfer would call."""
    if (given := os.environ.get("FLASHINFER_NVCC")) is not None:
        return Path(given)
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home is None and (found := shutil.which("nvcc")) is not None:
        return Path(found)
    path = Path(home if home is not None else "/usr/local/cuda", "bin", "nvcc")
    return path if path.exists() else None


def add_scripts_to_path() -> None:
    """Let FlashInfer find the ninja that pip installed with it where the environment is not activated."""
    os.environ["PATH"] = _path_with_scripts()


def _path_with_scripts() -> str:
    scripts, path = str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)
    return path if scripts in path.split(os.pathsep) else f"{path}{os.pathsep}{scripts}"


def flashinfer_cache_dir() -> Path:
    """Where FlashInfer keeps compiled kernels; the variable FLASHINFER_WORKSPACE_BASE moves it."""
    return Path(os.environ.get("FLASHINFER_WORKSPACE_BASE", Path.home()), ".cache", "flashinfer")


def triton_cache_dir() -> Path:
    """Where Triton keeps compiled kernels; the variable TRITON_CACHE_DIR moves it."""
    return Path(
        os.environ.get(
            "TRITON_CACHE_DIR", Path(os.environ.get("TRITON_HOME", Path.home()), ".triton", "cache")
        )
    )
