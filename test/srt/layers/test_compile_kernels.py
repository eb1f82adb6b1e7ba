"""Compiling ahead of time and beside serving, with stand-ins for FlashInfer's modules."""

import os
import subprocess
import sys
from threading import Barrier, Event
from typing import Any

import pytest
import torch
from fixtures.deadlines import HANG_S

from ebbtide.srt.errors import ConfigurationError
from ebbtide.srt.layers.attention import flashinfer_kernels
from ebbtide.srt.layers.attention.base import AttentionShape
from ebbtide.srt.layers.attention.paged_kernel import UntilCompiled
from ebbtide.srt.layers.heads import AttentionKind

SHAPE = AttentionShape(4, 2, 64, 16, torch.bfloat16, torch.bfloat16, (AttentionKind(0.125),))


class Spec:
    """What FlashInfer compiles, and how that goes."""

    is_aot = False

    def __init__(
        self,
        log: list[str],
        error: Exception | None = None,
        *,
        is_compiled: bool = False,
        meets: Barrier | None = None,
    ) -> None:
        self.is_compiled = is_compiled
        self._meets = meets
        self._log = log
        self._error = error

    def build(self, verbose: bool) -> None:
        if self._meets is not None:
            self._meets.wait()
        self._log.append("built")
        if self._error is not None:
            raise self._error


def compile_with(monkeypatch: pytest.MonkeyPatch, log: list[str], **specs: Spec) -> None:
    """Compile these modules; each step goes to the log."""
    monkeypatch.setenv("PATH", os.environ["PATH"])  # which compiling changes
    flashinfer_kernels.compile_kernels(
        specs, lambda name, number, total: log.append(f"{name} {number}/{total}")
    )


def test_what_is_missing_is_compiled_side_by_side_and_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    both = Barrier(2, timeout=HANG_S)
    specs = {name: Spec(log, meets=both) for name in ("prefill", "decode")}
    compile_with(monkeypatch, log, shared=Spec(log, is_compiled=True), **specs)
    assert log[0] == "compiling attention 0/2"
    assert sorted(log[1:]) == ["built", "built", "compiling attention 1/2", "compiling attention 2/2"]
    compile_with(monkeypatch, log := [], shared=Spec(log, is_compiled=True))
    assert log == []


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
    missing = FileNotFoundError(2, "No such file or directory", "ninja")
    with pytest.raises(ConfigurationError, match=r"No such file.*ninja"):
        compile_with(monkeypatch, log, decode=Spec(log, missing))


class Kernel:
    """Says who planned and who ran."""

    def __init__(self, name: str, log: list[str]) -> None:
        self._name, self._log = name, log

    def plan(self, lens: Any, *, captured: bool, whole: bool = False) -> str:
        return f"{self._name}'s plan"

    def run(self, plan: Any, *tensors: Any) -> None:
        self._log.append(f"{self._name} ran {plan}")


@pytest.mark.parametrize("fails", [False, True])
def test_a_kernel_that_compiles_beside_serving_takes_over_from_the_next_plan_on(
    fails: bool,
) -> None:
    log: list[str] = []
    may_end = Event()

    def compile_and_make() -> Kernel:
        may_end.wait(HANG_S)
        if fails:
            raise RuntimeError("no such compiler")
        return Kernel("second", log)

    kernel: Any = UntilCompiled(Kernel("first", log), compile_and_make)
    planned_before = kernel.plan(None, captured=False)
    may_end.set()
    kernel.wait()
    for plan in (planned_before, kernel.plan(None, captured=False)):
        kernel.run(plan, None, None)
    now = "first" if fails else "second"
    assert log == ["first ran first's plan", f"{now} ran {now}'s plan"]


ONE_ROW = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from ebbtide.srt.layers.small_batch import kernels

TYPES = dict.fromkeys(("x_ptr", "weight_ptr", "out_ptr"), "*bf16")
TYPES |= dict.fromkeys(("slot_stride", "num_shrinking", "num_tokens"), "i32") | {"eps": "fp32"}
GIVEN = {"num_rows": 1, "NUM_COLUMNS": 64, "SPLIT_COLUMNS": 64, "BLOCK_TOKENS": 16, "BLOCK_ROWS": 64}
GIVEN |= {"BLOCK_COLUMNS": 64, "PREFETCHED_COLUMNS": 64, "OVERLAPPED": True, "RANK_SPLITS": 1}
for kernel in (kernels.matvec, kernels.product):
    kinds = {name: TYPES.get(name, "constexpr") for name in kernel.arg_names}
    values = {(place,): GIVEN.get(name, False if name.isupper() else None)
              for place, name in enumerate(kinds) if kinds[name] == "constexpr"}
    compile(ASTSource(kernel, kinds, values), target=GPUTarget("cuda", 90, 32))
    print(kernel.fn.__name__)
"""


def test_products_of_few_tokens_compile_for_a_weight_of_one_row() -> None:
    """As the gates of shared experts have it: Triton makes a constant of an argument that is 1."""
    pytest.importorskip("triton")
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    kept["PYTHONPATH"] = os.pathsep.join(sys.path)
    run = subprocess.run(
        [sys.executable, "-c", ONE_ROW], env=kept, capture_output=True, text=True, check=False
    )
    assert run.stdout.split() == ["matvec", "product"], run.stderr[-4000:]
