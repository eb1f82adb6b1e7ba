"""How many files a process may hold open, by a kernel that stands in for the real one."""

import resource
from pathlib import Path

import pytest

from ebbtide.srt import this_process
from ebbtide.srt.this_process import raise_file_limit

SYSTEM = 2048


@pytest.mark.parametrize(
    ("hard", "expected"), [(1500, 1500), (1 << 20, SYSTEM), (resource.RLIM_INFINITY, SYSTEM)]
)
def test_the_limit_is_what_the_system_allows(
    hard: int, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = [(1024, hard)]

    def set_limits(kind: int, wanted: tuple[int, int]) -> None:
        if not 0 <= wanted[0] <= wanted[1] <= SYSTEM:
            raise ValueError("not allowed to raise maximum limit")
        limits.append(wanted)

    (tmp_path / "nr_open").write_text(f"{SYSTEM}\n")
    monkeypatch.setattr(this_process, "SYSTEM_LIMIT", tmp_path / "nr_open")
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", set_limits)
    raise_file_limit()
    assert limits[-1][0] == expected
