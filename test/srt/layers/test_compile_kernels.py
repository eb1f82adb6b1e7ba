"""Compiling ahead of time, with stand-ins for FlashInfer's modules: what is said when a compiler fails."""

from __future__ import annotations

import os

import pytest
import torch

from ebbtide.srt.errors import ConfigurationError
from ebbtide.srt.layers.attention import flashinfer_compile
from ebbtide.srt.layers.attention.base import AttentionKind, AttentionShape

SHAPE = AttentionShape(4, 2, 64, 16, torch.bfloat16, torch.bfloat16, (AttentionKind(0.125),))


class Spec:
    """What FlashInfer compiles, and how that goes."""

    is_aot = False

    def __init__(self, log: list[str], error: Exception | None = None, *, is_compiled: bool = False) -> None:
        self.is_compiled = is_compiled
        self._log = log
        self._error = error

    def build(self, verbose: bool) -> None:
        self._log.append("built")
        if self._error is not None:
            raise self._error


def compile_with(monkeypatch: pytest.MonkeyPatch, log: list[str], **specs: Spec) -> None:
    """Compile these modules, and no kernels of Triton; each step goes to the log."""
    monkeypatch.setenv("PATH", os.environ["PATH"])  # which compiling changes
    monkeypatch.setattr(flashinfer_compile, "module_specs", lambda shape, device: specs)
    monkeypatch.setattr(flashinfer_compile, "_run_small_kernels", lambda *_: log.append("ran"))
    flashinfer_compile.compile_kernels(
        SHAPE, torch.device("cpu"), lambda name, number, total: log.append(f"{name} {number}/{total}")
    )


def test_each_step_is_said_before_it_begins_and_nothing_is_compiled_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []
    compile_with(monkeypatch, log, decode=Spec(log, is_compiled=True), prefill=Spec(log))
    assert log == ["compiling prefill 1/2", "built", "loading rotation and activation 2/2", "ran"]


def test_a_compiler_that_fails_is_quoted_from_its_end_and_what_works_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = "nvcc " + 5000 * "x"
    steps = [f"[{number}/90] done" for number in range(90)]
    output = "\n".join([*steps, command, "", "page.cuh(7): error: no such type", "ninja: build stopped."])
    log: list[str] = []
    with pytest.raises(ConfigurationError) as raised:
        compile_with(monkeypatch, log, decode=Spec(log, RuntimeError(f"Ninja build failed.\n{output}")))
    message = str(raised.value)
    assert message.startswith("FlashInfer could not compile the kernels of decode")
    assert "attention_backend=torch_native" in message
    assert message.endswith("\npage.cuh(7): error: no such type\nninja: build stopped.")
    assert "[3/90]" not in message
    assert max(map(len, message.splitlines())) < 500


def test_a_compiler_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    with pytest.raises(ConfigurationError, match=r"No such file.*ninja"):
        compile_with(
            monkeypatch, log, decode=Spec(log, FileNotFoundError(2, "No such file or directory", "ninja"))
        )
