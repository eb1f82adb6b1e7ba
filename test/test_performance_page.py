"""The tables of the documents are those of the results, and say what nobody has measured."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from fixtures.compat import play

ROOT = Path(__file__).resolve().parents[1]
PAGE = "before\n<!-- table start -->\n<!-- end -->\n<!-- table sources -->\n<!-- end -->\nafter\n"


def generate(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "bench" / "performance_page.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def result(first_token_s: float, date: str) -> dict[str, Any]:
    row = {
        "value": first_token_s,
        "goal": 20,
        "reached": first_token_s <= 20,
        "limit": 4.0,
        "limit_basis": "a bare process",
        "fraction_of_limit": 4.0 / first_token_s,
    }
    gpu = {"name": "Some GPU", "memory": "1 MiB", "driver": "1.2"}
    return {
        "benchmark": "gpu_start",
        "date": date,
        "commit": "0123456789abcdef",
        "uncommitted_changes": False,
        "hardware": {"gpus": [gpu], "cuda": "13.0"},
        "versions": {"python": "3.12", "torch": "2.11"},
        "results": {"rows": {"start.first_token": row}},
    }


def test_the_page_says_what_the_results_say() -> None:
    run = generate("--check")
    assert run.returncode == 0, run.stderr


def test_the_table_of_scaling_is_that_of_the_results() -> None:
    table = play(ROOT / "bench" / "control_fan_out.py", "--table")
    assert table.count("\n") > 10
    assert table in (ROOT / "docs" / "scaling.md").read_text()


def test_a_table_is_filled_from_the_latest_result(tmp_path: Path) -> None:
    page, results = tmp_path / "page.md", tmp_path / "results"
    results.mkdir()
    page.write_text(PAGE)
    options = ("--page", str(page), "--results", str(results))

    assert generate(*options).returncode == 0
    assert "| start to first token, kernels cached | not measured" in page.read_text()

    for name, seconds, date in (("gpu_a", 16.0, "2026-02-02"), ("gpu_b", 99.0, "2026-01-01")):
        (results / f"{name}.json").write_text(json.dumps(result(seconds, date)))
    assert generate("--check", *options).returncode != 0
    assert generate(*options).returncode == 0
    text = page.read_text()
    # A GPU that is not the usual one is named.
    assert "| start to first token, kernels cached (Some) | **16 s** | ≤ 20 | 4 (a) | 25% |" in text
    assert "(a) a bare process." in text
    assert "0123456789" in text
    assert "Some GPU" in text
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "| start to first token, kernels cached | not measured" not in text
    assert generate("--check", *options).returncode == 0
