"""The table of docs/scaling.md is that of the results."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_the_table_is_that_of_the_results() -> None:
    command = [sys.executable, str(ROOT / "bench" / "control_fan_out.py"), "--table"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "python")}
    table = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    assert table.count("\n") > 10
    assert table in (ROOT / "docs" / "scaling.md").read_text()
