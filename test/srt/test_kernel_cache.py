"""What is said where FlashInfer cannot be used, and where compiled kernels are kept."""

import importlib.util
import os
from pathlib import Path

import pytest

from ebbtide.srt import kernel_cache
from ebbtide.srt.kernel_cache import (
    add_scripts_to_path,
    flashinfer_cache_dir,
    flashinfer_problem,
)


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with FlashInfer and, in the folder returned, a compiler and ninja; nothing else is on it."""
    installed = {"flashinfer"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in installed else None)
    for variable in ("CUDA_PATH", "FLASHINFER_NVCC", "CXX"):
        monkeypatch.delenv(variable, raising=False)
    for name in ("c++", "ninja", "bin/nvcc"):
        tool = tmp_path / name
        tool.parent.mkdir(exist_ok=True)
        tool.write_text("#!/bin/sh\n")
        tool.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(kernel_cache.sys, "executable", "/nowhere/python")
    return tmp_path


@pytest.mark.parametrize(
    ("tool", "message"),
    [("bin/nvcc", "finds no nvcc"), ("c++", "finds no C++ compiler"), ("ninja", "pip install ninja")],
)
def test_a_missing_tool_is_named_unless_kernels_are_precompiled(
    tools: Path, tool: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert flashinfer_problem() is None
    (tools / tool).unlink()
    assert message in (flashinfer_problem() or "")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert flashinfer_problem() is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert flashinfer_problem() == 'FlashInfer is not installed (pip install "ebbtide[cuda]")'


def test_ninja_beside_the_interpreter_is_found(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripts = tools / "scripts"
    scripts.mkdir()
    (tools / "ninja").rename(scripts / "ninja")
    monkeypatch.setattr(kernel_cache.sys, "executable", str(scripts / "python"))

    assert flashinfer_problem() is None
    assert str(scripts) not in os.environ["PATH"]
    add_scripts_to_path()
    assert os.environ["PATH"].split(os.pathsep) == [str(tools), str(scripts)]
    add_scripts_to_path()
    assert os.environ["PATH"].split(os.pathsep) == [str(tools), str(scripts)]


def test_a_variable_moves_flashinfers_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))

    assert flashinfer_cache_dir() == tmp_path / ".cache" / "flashinfer"
