"""Folders of sockets: whose owner was killed, those go at the next start."""

import os
import signal
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ebbtide.srt.entrypoints.launch.placement import SocketFolder


@pytest.fixture(autouse=True)
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def made_folder() -> SocketFolder:
    folder = SocketFolder()
    folder.make()
    return folder


def killed_owners_folder(parent: Path) -> Path:
    """A folder of sockets whose owner was killed."""
    before = set(parent.iterdir())
    owner = os.fork()
    if owner == 0:
        try:
            (Path(made_folder().path) / "scheduler").touch()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(owner, 0)
    [left] = set(parent.iterdir()) - before
    return left


def test_a_start_removes_what_a_killed_engine_left_and_nothing_else(parent: Path) -> None:
    live = made_folder()
    of_a_user = parent / "ebbtide-checkpoints"
    of_a_user.mkdir()
    left = killed_owners_folder(parent)
    started = made_folder()
    assert not left.exists()
    assert set(parent.iterdir()) == {Path(live.path), Path(started.path), of_a_user}
    for folder in (started, live, live):
        folder.remove()
    assert list(parent.iterdir()) == [of_a_user]


def test_starts_beside_one_another_leave_each_other_alone(parent: Path) -> None:
    def starts() -> None:
        for _ in range(50):
            folder = made_folder()
            assert Path(folder.path).exists()
            folder.remove()

    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(starts) for _ in range(8)]:
            future.result()
    assert list(parent.iterdir()) == []
