"""The commands: what they answer, with which exit status, and that they start light."""

import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

import pytest

import ebbtide
from ebbtide import cli, launch_server
from ebbtide.srt.entrypoints.launch.child_process import EarlyProcesses
from ebbtide.srt.errors import ConfigurationError, EngineError
from ebbtide.srt.server_args import ServerArgs


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *argv], capture_output=True, text=True, check=False)


def serve_with(monkeypatch: pytest.MonkeyPatch, error: Exception | None) -> list[ServerArgs]:
    """Put a server in place that notes its arguments and stops at once, as asked or by the error."""
    served: list[ServerArgs] = []

    def serve(args: ServerArgs, early: EarlyProcesses) -> None:
        served.append(args)
        if error is not None:
            raise error

    http_server = ModuleType("ebbtide.srt.entrypoints.http_server")
    http_server.launch_server = serve  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, http_server.__name__, http_server)
    return served


def test_the_package_offers_four_names_and_starts_light() -> None:
    assert ebbtide.__all__ == ["Client", "Engine", "SamplingParams", "ServerArgs"]
    assert set(ebbtide.__all__) <= set(dir(ebbtide))
    with pytest.raises(AttributeError, match="Motor"):
        _ = ebbtide.Motor
    script = "import sys, ebbtide; ebbtide.ServerArgs, ebbtide.SamplingParams;"
    script += "assert not {'torch', 'transformers', 'zmq', 'fastapi'} & set(sys.modules);"
    # The API process too does without what takes a second and 200 MB.
    script += "import ebbtide.srt.entrypoints.http_server;"
    script += "assert not {'torch', 'transformers'} & set(sys.modules)"
    done = run("-c", script)
    assert (done.returncode, done.stderr) == (0, "")


def test_help_lists_the_commands() -> None:
    done = run("-m", "ebbtide", "--help")
    assert done.returncode == 0
    commands = ("serve", "demo", "warmup", "doctor", "chat", "status", "update", "top", "bench")
    assert all(f" {name} " in done.stdout for name in commands)


def test_a_daemon_without_standard_streams_gets_some_for_the_processes_it_starts() -> None:
    child = (
        "import os, sys; [os.fstat(descriptor) for descriptor in range(3)]; print('heard', file=sys.stderr)"
    )
    script = (
        "import subprocess, sys; from ebbtide.launch_server import open_standard_streams; "
        f'open_standard_streams(); sys.exit(subprocess.call([sys.executable, "-c", "{child}"]))'
    )
    closing = ["/bin/sh", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, script]
    assert subprocess.run(closing, check=False).returncode == 0


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"ebbtide {ebbtide.__version__}\n"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["stauts"], "Did you mean 'status'?"),
        (["release", "kv_cash"], "kv_cash"),
        (["pause", "--mode", "softly"], "in_place"),
        (["status", "--url", "nowhere"], "expected one such as http://"),
        (["update"], "folder"),
    ],
)
def test_a_wrong_command_line_is_named(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) in (1, 2)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["serve"], "--model-path"),
        (["serve", "m", "--surf"], "unrecognized arguments: --surf\n"),
        (["serve", "m", "--max-model-len=9"], "unrecognized arguments: --max-model-len=9\n"),
        (["serve", "m", "--mem-fraction-statik=0.5"], "did you mean --mem-fraction-static?"),
        (["warmup", "--model", "m", "--tensor-paralel-size", "2"], "did you mean --tensor-parallel-size?"),
    ],
)
def test_a_wrong_argument_of_serve_is_a_usage_error(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("usage:")
    assert said in shown


def test_the_help_of_serve_is_in_sections(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--help"]) == 0
    shown = capsys.readouterr().out
    before, _, memory = shown.partition("Releasing memory and updating weights:\n")
    assert "--tp-size" in before.partition("Ranks, nodes and devices:\n")[2]
    assert "--kv-park-bytes" in memory
    assert re.findall(r"^ +-\S+", before.partition("\nModel:\n")[0], re.M) == ["  -h,"]


@pytest.mark.parametrize(("main", "command"), [(cli.main, ["serve"]), (launch_server.main, [])])
def test_both_doors_serve_with_the_same_arguments(
    main: Callable[[Sequence[str]], int], command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve_with(monkeypatch, None)
    assert main([*command, "--model-path", "m", "--port", "31000"]) == 0
    assert main([*command, "m", "--port", "31000"]) == 0
    assert served == [ServerArgs(model_path="m", port=31000)] * 2


@pytest.mark.parametrize(
    ("error", "status"), [(ConfigurationError("no such folder"), 2), (EngineError("scheduler died"), 1)]
)
def test_a_failed_start_is_one_line_and_a_status(
    error: Exception, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    serve_with(monkeypatch, error)
    assert cli.main(["serve", "--model-path", "m"]) == status
    assert capsys.readouterr().err == f"ebbtide serve: {error}\n"


def test_a_missing_model_is_one_line_without_a_traceback() -> None:
    # It has logging its own way: not in this process.
    done = run("-m", "ebbtide.launch_server", "--model-path", "/no/such/model")
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert "'/no/such/model'" in line


def test_a_demo_without_matplotlib_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("ebbtide.demo")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["demo"]) == 2
    assert 'pip install "ebbtide[demo]"' in capsys.readouterr().err
