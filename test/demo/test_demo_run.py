"""The demo with the real engine, too short to learn: it measures, reports, and says that it failed."""

import io
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import transformers
from rich.console import Console

from ebbtide.demo import run as run_module
from ebbtide.demo.run import Settings, main, run
from ebbtide.demo.trainer import EOS_ID, DemoFailed, Trainer

TINY = Settings(
    num_steps=2, num_prompts=4, group_size=2, num_disturbed=64, warm_up_goal=1e-9, kv_pool_bytes=16_000_000
)


def attempt(out: Path) -> tuple[str, str]:
    """Run `TINY`; returns the failure and what the terminal showed."""
    screen = io.StringIO()
    with pytest.raises(DemoFailed) as failed:
        run(TINY, 0, out, Console(file=screen, width=200))
    return str(failed.value), screen.getvalue()


def test_a_run_that_does_not_learn_measures_and_reports(tmp_path: Path):
    failure, shown = attempt(tmp_path)
    assert "the reward went from 0.000 to 0.000" in failure
    rows = [line.split() for line in shown.splitlines() if line.strip()[:1] in ("0", "1")]
    assert [cells[0] for cells in rows] == ["0", "1"]
    for cells in rows:
        weights, kv_cache = cells[-4:-2]
        assert weights.endswith("→0.0")
        assert 15.0 < float(kv_cache.removesuffix("→0.0")) < 20.0
        assert float(cells[-1]) < 1e-4
    assert failure in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert transformers.Qwen3ForCausalLM.from_pretrained(tmp_path / "model").config.vocab_size == 14


class Stub:
    """Has nothing but the end of the text to say, always with the same log-probability."""

    def generate(
        self, prompts: Sequence[str], params: dict[str, Any], *, return_logprob: bool = False
    ) -> list[dict[str, Any]]:
        told = {"weight_versions": [{"version": "0"}], "output_token_logprobs": [(-1.0, EOS_ID, None)]}
        output = {"text": "", "output_ids": [EOS_ID], "meta_info": told}
        return [output] * (len(prompts) * params.get("n", 1))

    def memory_occupation(self) -> dict[str, Any]:
        return {"tags": {tag: {"resident_bytes": 0, "backup_bytes": 0} for tag in ("weights", "kv_cache")}}

    def release_memory_occupation(self) -> None:
        pass


def test_an_engine_that_disagrees_with_the_trainer_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(run_module, "_start_engine", lambda *_: nullcontext(Stub()))
    off = 2e-4
    monkeypatch.setattr(Trainer, "logprobs", lambda _, samples: [[-1.0 - off] for _ in samples])
    failure, shown = attempt(tmp_path)
    assert "step 0: logprobs of trainer and engine differ by 2.0" in failure
    assert "wrote" not in shown


@pytest.mark.parametrize(("raised", "status"), [(DemoFailed("no [luck]"), 1), (KeyboardInterrupt(), 130)])
def test_failures_are_exit_statuses(raised, status, monkeypatch, capsys):
    def fail(*_: object) -> None:
        raise raised

    monkeypatch.setattr(run_module, "run", fail)
    assert main([]) == status
    if status == 1:
        assert "demo failed: no [luck]" in capsys.readouterr().out


def test_no_steps_are_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--steps", "0"])
    assert "expected a positive number" in capsys.readouterr().err
