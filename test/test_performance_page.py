"""The tables of the documents are those of the results, and say what nobody has measured."""

import subprocess
import sys
from pathlib import Path

from fixtures.compat import play

ROOT = Path(__file__).resolve().parents[1]


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "bench" / "performance_page.py"), "--check", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_page_says_what_the_results_say(tmp_path: Path) -> None:
    checked = check()
    assert checked.returncode == 0, checked.stderr
    assert check("--results", str(tmp_path)).returncode != 0, "nothing is measured there"


def test_the_table_of_scaling_is_that_of_the_results() -> None:
    table = play(ROOT / "bench" / "control_fan_out.py", "--table")
    assert table.count("\n") > 10
    assert table in (ROOT / "docs" / "scaling.md").read_text()
