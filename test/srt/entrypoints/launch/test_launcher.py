"""Starting, watching and ending processes: real ones, with scripts in place of the engine's parts."""

import io
import itertools
import os
import queue
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from fixtures.servers import ENVIRONMENT, environment_of, is_alive, wait_until

from ebbtide.srt.entrypoints.launch.child_process import ChildProcess
from ebbtide.srt.entrypoints.launch.console import Stopped
from ebbtide.srt.entrypoints.launch.launcher import NodeProcesses, serve_node
from ebbtide.srt.errors import ConfigurationError, EngineError
from ebbtide.srt.memory_saver import saver
from ebbtide.srt.server_args import ServerArgs
from ebbtide.testing.null_runner import null_config

CONFIG = null_config(ServerArgs(model_path="none", log_level="critical", device="cpu"))
TEST_FOLDER = Path(__file__).parents[2]


def targets(**names: str) -> dict[str, str]:
    return {name: f"fixtures.scripted_processes:{function}" for name, function in names.items()}


def left_in(folder: Path) -> list[Path]:
    return list(folder.glob("ebbtide-*"))


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where socket folders are made. Empty after each test: nothing is left behind, however it went."""
    with tempfile.TemporaryDirectory(prefix="eb-") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)
        assert left_in(Path(folder)) == []


@pytest.fixture
def processes() -> Iterator[NodeProcesses]:
    started = NodeProcesses(CONFIG, targets(scheduler="report_rank", detokenizer="report_rank"))
    yield started
    started.shutdown()


def test_ready_processes_report_what_the_engine_has_and_end_with_shutdown(
    processes: NodeProcesses, folder: Path
) -> None:
    assert processes.wait_ready() == {"max_total_num_tokens": 64}
    pids = processes.pids
    assert set(pids) == {"scheduler", "detokenizer"}
    assert all(is_alive(pid) for pid in pids.values())
    [sockets] = left_in(folder)
    assert stat.S_IMODE(sockets.stat().st_mode) == 0o700
    assert processes.replicas[0].scheduler == f"ipc://{sockets}/scheduler"
    deaths: queue.SimpleQueue[str] = queue.SimpleQueue()
    processes.watch(deaths.put)
    processes.shutdown()
    processes.shutdown()
    assert not any(is_alive(pid) for pid in pids.values())
    assert not sockets.exists()
    assert deaths.empty(), "a shutdown is no death"


@pytest.mark.parametrize(
    ("script", "error", "message"),
    [
        ("refuse_late", ConfigurationError, "model.safetensors: expected 25 tensors, found 24"),
        ("crash", EngineError, "the start of the scheduler process failed: ValueError: boom"),
        ("vanish", EngineError, "the start failed: the scheduler process ended with exit code 7"),
    ],
)
def test_a_start_that_fails_says_why_and_leaves_nothing(
    script: str, error: type[Exception], message: str
) -> None:
    started = NodeProcesses(CONFIG, targets(scheduler=script, detokenizer="report_rank"))
    pids = started.pids.values()
    with pytest.raises(error) as raised:
        started.wait_ready()
    assert str(raised.value) == message
    assert not any(is_alive(pid) for pid in pids)


def test_stages_are_shown_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", stream)
    started = NodeProcesses(CONFIG, targets(scheduler="report_stages"))
    try:
        assert started.wait_ready()["max_total_num_tokens"] == 64
    finally:
        started.shutdown()
    assert "loading weights 2/3" in stream.getvalue()


def test_a_death_by_an_error_is_reported_with_that_error() -> None:
    deaths: queue.SimpleQueue[str] = queue.SimpleQueue()
    started = NodeProcesses(CONFIG, targets(scheduler="crash_when_ready"))
    started.wait_ready()
    # It may be dead already: that is reported all the same.
    started.watch(deaths.put)
    assert deaths.get() == "the scheduler process ended with exit code 1: ValueError: boom"
    started.shutdown()


@pytest.mark.parametrize(
    ("backend", "mode", "preloaded"), [("torch_memory_saver", "preload", True), ("auto", "preload", False)]
)
def test_torch_memory_saver_is_preloaded_where_it_is_asked_for(
    backend: str, mode: str, preloaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = {"LD_PRELOAD": "libc.so.6"}  # one that is always there
    monkeypatch.setattr(saver, "preload_environment", lambda: library)
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    monkeypatch.setenv("EBBTIDE_TMS_HOOK_MODE", mode)
    args = replace(CONFIG.server_args, memory_saver_backend=backend)
    config = replace(CONFIG, server_args=args)
    started = NodeProcesses(config, targets(scheduler="report_rank", detokenizer="report_rank"))
    try:
        started.wait_ready()
        found = {name: environment_of(pid).get("LD_PRELOAD") for name, pid in started.pids.items()}
    finally:
        started.shutdown()
    assert found == {"scheduler": "libc.so.6" if preloaded else None, "detokenizer": None}


def test_a_hook_mode_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EBBTIDE_TMS_HOOK_MODE", "prelaod")
    with pytest.raises(ConfigurationError, match="EBBTIDE_TMS_HOOK_MODE: expected torch or preload"):
        NodeProcesses(CONFIG, targets(scheduler="report_rank"))


def stop_at(number: int) -> Callable[[FrameType, str, object], Any]:
    """A trace function that raises `Stopped` at that line of the launcher, as a signal does."""
    lines = itertools.count()

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if "/launch/" not in frame.f_code.co_filename:
            return None
        if event == "line" and next(lines) == number:
            raise Stopped
        return trace

    return trace


def test_a_stop_at_any_line_of_the_start_leaves_no_folder(folder: Path) -> None:
    for number in itertools.count():
        before = sys.gettrace()
        sys.settrace(stop_at(number))
        try:
            processes = NodeProcesses(CONFIG, {})
        except Stopped:
            assert left_in(folder) == [], f"stopped at line {number}"
            continue
        finally:
            sys.settrace(before)
        processes.shutdown()
        break
    assert number > 50


def test_processes_whose_object_is_lost_end_by_themselves(folder: Path) -> None:
    """As of a start that is interrupted just before what it returns has a name."""
    lost = NodeProcesses(CONFIG, targets(scheduler="report_rank", detokenizer="report_rank"))
    lost.wait_ready()
    pids = list(lost.pids.values())
    del lost
    wait_until(lambda: not any(is_alive(pid) for pid in pids), "they have ended")
    wait_until(lambda: not left_in(folder), "their folder has gone")


def test_a_shutdown_that_is_interrupted_is_completed_by_the_next(
    processes: NodeProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids, close = processes.pids, ChildProcess.close

    def interrupted(child: ChildProcess) -> None:
        close(child)
        monkeypatch.setattr(ChildProcess, "close", close)
        raise KeyboardInterrupt

    monkeypatch.setattr(ChildProcess, "close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        processes.shutdown()
    processes.shutdown()
    assert not any(is_alive(pid) for pid in pids.values())


def test_a_signal_to_a_node_that_ends_already_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pids, close = [], ChildProcess.close

    def signalled(child: ChildProcess) -> None:
        pids.append(child.pid)
        signal.raise_signal(signal.SIGTERM)
        close(child)

    monkeypatch.setattr(ChildProcess, "close", signalled)
    monkeypatch.setattr(NodeProcesses, "watch", lambda node, on_death, on_stop: on_stop())
    serve_node(lambda: CONFIG, targets(scheduler="report_rank", detokenizer="report_rank"))
    assert len(pids) == 2
    assert not any(is_alive(pid) for pid in pids)


def test_signals_are_left_to_the_parent_and_a_fork_of_it_ends_nothing(processes: NodeProcesses) -> None:
    processes.wait_ready()
    for pid in processes.pids.values():
        status = dict(line.split(":\t") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        for number in (signal.SIGINT, signal.SIGTERM):
            assert int(status["SigIgn"], 16) & 1 << number - 1
            assert not int(status["SigBlk"], 16) & 1 << number - 1
    forked = os.fork()
    if forked == 0:
        processes.shutdown()
        os._exit(0)
    os.waitpid(forked, 0)
    assert all(is_alive(pid) for pid in processes.pids.values())


def test_a_temporary_folder_too_deep_for_sockets_is_refused(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    deep = folder / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(ConfigurationError, match="TMPDIR is too long for sockets"):
        NodeProcesses(CONFIG, targets(scheduler="report_rank"))
    assert left_in(deep) == []


def test_a_machine_without_a_temporary_folder_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # As a container has none whose files can only be read.
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc/self"])
    with pytest.raises(ConfigurationError, match=r"No usable temporary directory .*: name one .* by TMPDIR"):
        NodeProcesses(CONFIG, {})


# No guard against a second import of `__main__`: starting a process by multiprocessing would run it again.
SCRIPT = """
import threading
from ebbtide.srt.entrypoints.launch.console import Stopped
from ebbtide.srt.entrypoints.launch.launcher import NodeProcesses
from ebbtide.srt.server_args import ServerArgs
from ebbtide.testing.null_runner import null_config

config = null_config(ServerArgs(model_path="none", log_level="critical", device="cpu"))
processes = NodeProcesses(config, {"scheduler": "fixtures.scripted_processes:report_rank"})
processes.wait_ready()
print(processes.pids["scheduler"], flush=True)
threading.Event().wait()
"""


def test_processes_start_from_any_program_and_end_when_it_is_killed(folder: Path) -> None:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    path = f"{ENVIRONMENT['PYTHONPATH']}:{TEST_FOLDER}"
    environment = {**ENVIRONMENT, "PYTHONPATH": path, "TMPDIR": str(folder)}
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, env=environment) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        owner.kill()
        assert owner.stdout.read() == b""
    wait_until(lambda: not is_alive(pid), "the engine's process has gone")
    wait_until(lambda: left_in(folder) == [], "the sockets have gone")
