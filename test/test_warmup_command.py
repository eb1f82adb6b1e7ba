"""`ebbtide warmup`: what it builds, what it says, and that a second time there is nothing left to compile."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.checkpoints import make_checkpoint

from ebbtide import cli
from ebbtide.srt import config, device
from ebbtide.srt.device import CpuDevice
from ebbtide.srt.errors import EngineError
from ebbtide.srt.model_executor import builder


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A model without its weights, as nothing of them is to be read."""
    path = make_checkpoint(tmp_path / "checkpoint", "Qwen3ForCausalLM", dtype="bfloat16", head_dim=128)
    (path / "model.safetensors").unlink()
    return path


def test_on_a_cpu_there_is_nothing_to_compile(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["warmup", str(checkpoint), "--device", "cpu"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "nothing is compiled for a CPU"


def test_the_model_is_built_as_it_will_be_served(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    built: list[tuple[Any, ...]] = []
    monkeypatch.setattr(config, "_resolve_device", lambda args: "cuda:0")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(device, "open_device", lambda name: CpuDevice())
    monkeypatch.setattr(builder, "build_model_runner", lambda *parts, rehearses: built.append(parts))

    given = [
        "--tp",
        "2",
        "--cuda-graph-max-bs",
        "4",
        "--chunked-prefill-size",
        "1024",
        "--max-total-tokens",
        "99999999",
    ]
    assert cli.main(["warmup", "--model-path", str(checkpoint), *given]) == 0

    [(resolved, _, _, group, _)] = built
    assert resolved.model.load_format == "dummy"
    assert resolved.cache.max_total_tokens < 99999999
    assert resolved.schedule.chunked_prefill_size == 1024
    assert resolved.runtime.cuda_graph_bs == (1, 2, 4)
    assert (group.rank, group.size) == (0, 2)
    assert capsys.readouterr().out.splitlines()[-1].startswith("ready, after ")


def test_what_fails_in_between_is_one_line_and_a_status(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(name: str) -> None:
        raise EngineError("cuMemCreate: the driver refuses")

    monkeypatch.setattr(config, "_resolve_device", lambda args: "cuda:0")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(device, "open_device", fail)
    assert cli.main(["warmup", "--model-path", str(checkpoint)]) == 1
    assert capsys.readouterr().err == "ebbtide warmup: cuMemCreate: the driver refuses\n"


@pytest.mark.gpu
def test_a_second_time_nothing_is_compiled(checkpoint: Path) -> None:
    if not torch.accelerator.is_available():
        pytest.skip("needs a CUDA GPU")
    command = [sys.executable, "-m", "ebbtide", "warmup", "--model-path", str(checkpoint)]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    for _ in range(2):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "ready, after " in done.stdout
    assert "compiling " not in done.stdout
