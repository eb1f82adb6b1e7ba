"""Each row of a table of failures in the documentation has the tests that it names."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(("name", "least_rows"), [("control_plane.md", 11), ("migrating_from_vllm.md", 20)])
def test_every_failure_in_the_table_has_a_test_of_that_name(name: str, least_rows: int) -> None:
    page = (ROOT / "docs" / name).read_text()
    table = page.split("<!-- failures -->")[1].split("<!-- end -->")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    tests = {
        name
        for file in (ROOT / "test").rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)", file.read_text())
    }
    assert len(rows) >= least_rows
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row)
        assert named, row
        assert set(named) <= tests, row
