"""Each row of the failure matrix in docs/control_plane.md has the test that it names."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_failure_in_the_table_has_a_test_of_that_name() -> None:
    page = (ROOT / "docs" / "control_plane.md").read_text()
    table = page.split("<!-- failures -->")[1].split("<!-- end -->")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    tests = {
        name
        for file in (ROOT / "test").rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)", file.read_text())
    }
    assert len(rows) > 10
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row)
        assert named, row
        assert set(named) <= tests, row
