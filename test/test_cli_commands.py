"""The commands that ask a server: what they print, and that they do what they say."""

import io
import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import Mock

import pytest
from fixtures.deadlines import HANG_S, wait_until
from fixtures.servers import Server, null_server, running_server, url_of
from safetensors.torch import load_file

from ebbtide import Client, cli
from ebbtide.cli.server import ColouredAnswer, Picture, telling_why_it_waits
from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.hf_folder import folder_of

README = Path(__file__).parent.parent / "README.md"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    keys = ("--api-key", "user", "--admin-api-key", "admin")
    with null_server("--weight-version", "0", *keys, is_ready=False) as server:
        server.wait_ready()
        yield server


class Terminal:
    def __init__(self, server: Server, capsys: pytest.CaptureFixture[str]) -> None:
        self._url, self._capsys = url_of(server), capsys

    def run(self, *argv: str, status: int = 0) -> str:
        """What a command prints; of one that fails, its line of error."""
        assert cli.main([*argv, "--url", self._url]) == status
        printed = self._capsys.readouterr()
        return printed.err if status else printed.out


@pytest.fixture
def terminal(server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("EBBTIDE_API_KEY", "user")
    monkeypatch.setenv("EBBTIDE_ADMIN_API_KEY", "admin")
    return Terminal(server, capsys)


def test_memory_goes_and_comes_back_with_other_weights(terminal: Terminal) -> None:
    assert "serving" in terminal.run("status")
    assert "freed weights" in terminal.run("release")
    assert "to go on: `ebbtide resume`, then `ebbtide update FOLDER`\n" in terminal.run("status")
    assert "4 parameters are stale" in terminal.run("resume", "weights", "kv_cache", "cuda_graph")
    assert "weights v5" in terminal.run("update", "5", "--version", "v5")
    assert "v5" in terminal.run("status")
    assert "parked 0 requests" in terminal.run("park")
    assert "mapped kv_cache" in terminal.run("resume")


def test_a_pause_is_begun_and_ended(terminal: Terminal) -> None:
    assert "paused (retract)" in terminal.run("pause", "--mode", "retract")
    assert "waiting: paused(retract); to go on: `ebbtide continue`\n" in terminal.run("status")
    assert "goes on" in terminal.run("continue")
    assert json.loads(terminal.run("continue", "--json"))["changed"] is False


def test_a_refusal_is_one_line(terminal: Terminal) -> None:
    assert terminal.run("update", "no number", status=1).startswith("ebbtide: ")
    assert "tokenizer" in terminal.run("generate", "a text", status=1)


def test_a_missing_key_is_asked_for_as_commands_take_it(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EBBTIDE_ADMIN_API_KEY")
    assert "EBBTIDE_ADMIN_API_KEY" in terminal.run("pause", status=1)


def test_a_bench_has_runs_without_and_with_an_update(terminal: Terminal) -> None:
    argv = ["bench", "--streams", "3", "--output-tokens", "20", "--runs", "2", "--update", "7", "--json"]
    rows = json.loads(terminal.run(*argv))["runs"]
    assert [len(figures) for figures in rows.values()] == [2, 2]
    assert all(one["tokens_per_s"] > 0 for figures in rows.values() for one in figures)
    assert all(one["update_reply_ms"] > 0 for one in rows["streams and an update"])
    assert terminal.run("status").count("weights bench-") == 1
    assert "tokens/s" in terminal.run("bench", "--streams", "1", "--output-tokens", "2", "--runs", "1")


def test_top_shows_a_picture(terminal: Terminal) -> None:
    picture = terminal.run("top", "--once")
    assert all(word in picture for word in ("weights", "kv_cache", "resident", "operation"))


def test_a_picture_has_the_last_operations_and_the_reason_why_requests_wait() -> None:
    picture = Picture()
    sample = {
        "resident_bytes": {"weights": 50}, "backup_bytes": {"weights": 0}, "load": {}, "reason": "paused",
        "weight_version": "3", "tokens_by_version": {"2": 5},
    }  # fmt: skip
    times = {"started_s": 0.0, "duration_s": 0.5}
    operation = {"operation": "pause", **times, "outcome": "refused", "message": "no"}
    picture.take({"history": {"operations": [operation], "samples": [sample]}})
    shown = _text(picture.draw("http://host"))
    assert "waiting: paused" in shown
    assert "refused: no" in shown
    assert "2: 5" in shown


def test_a_command_ends_though_its_server_hangs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ebbtide.cli.server.PATIENCE_S", 0.001)
    is_asked, answers, came = Event(), Event(), Future[bool]()

    def memory_occupation() -> dict[str, Any]:
        is_asked.set()
        came.set_result(answers.wait(HANG_S))
        tags = {"weights": {"state": "resident", "content": "valid"}, "kv_cache": {"state": "resident"}}
        return {"can_run": False, "reason": "paused", "tags": tags, "generation": {"state": "paused"}}

    others = set(threading.enumerate())
    with telling_why_it_waits(Mock(memory_occupation=memory_occupation)):
        [watcher] = set(threading.enumerate()) - others
        assert is_asked.wait(HANG_S)
    answers.set()
    watcher.join(HANG_S)
    assert came.result(0)
    assert capsys.readouterr().err == ""


def test_tokens_have_the_colour_of_their_version(capsys: pytest.CaptureFixture[str]) -> None:
    def chunk(text: str, *versions: str) -> dict[str, Any]:
        return {"text": text, "meta_info": {"weight_versions": [{"version": one} for one in versions]}}

    answer = ColouredAnswer()
    assert answer.show(iter([chunk("calm", "1"), chunk("calm storm", "1", "2")])) == "calm storm"
    printed = capsys.readouterr()
    assert printed.out == "calm storm\n"
    assert printed.err.split() == ["weights", "1", "2"]


@pytest.fixture(scope="module")
def tiny() -> Iterator[Server]:
    with running_server("tiny") as server:
        yield server


def test_a_conversation_goes_on_under_the_weights_of_an_update(
    tiny: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal, answers = Terminal(tiny, capsys), []
    for weights in ("tiny", "tiny-storm"):
        assert f"weights {weights}:" in terminal.run("update", weights)
        monkeypatch.setattr("sys.stdin", io.StringIO("How is the weather?\n"))
        answers.append(terminal.run("chat", "--temperature", "0"))
    assert [answer.count("!") > 2 for answer in answers] == [False, True]


@pytest.mark.parametrize(
    "argv",
    [["generate", "The sea"], ["generate", "The sea", "--json"], ["chat"], ["bench", "--streams", "1"]],
)
def test_who_waits_for_an_answer_is_told_why_meanwhile(
    tiny: Server, argv: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli.server, "PATIENCE_S", 0.01)
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello!\n"))
    with Client(url_of(tiny)) as client, ThreadPoolExecutor(1) as pool:
        client.pause_generation("in_place")
        ended = pool.submit(cli.main, [*argv, "--url", url_of(tiny)])
        said = io.StringIO()
        wait_until(lambda: bool(said.write(capsys.readouterr().err)) and "waiting" in said.getvalue())
        assert not ended.done()
        client.continue_generation()
        assert ended.result(HANG_S) == 0
    said.write(capsys.readouterr().err)
    assert said.getvalue().count("\nwaiting: paused(in_place); to go on: `ebbtide continue`\n") == 1


def test_the_commands_of_the_readme_run(
    tiny: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(r"```sh\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    serve, commands = [
        [line.partition("#")[0].split()[1:] for line in block.splitlines()]
        for block in blocks
        if "doctor" not in block
    ]
    assert serve == [["serve", "tiny"]]
    # `top` goes on until Ctrl-C, and `bench` for as long as a busy machine needs.
    short = {"top": ["--once"], "bench": ["--streams", "2", "--output-tokens", "8", "--runs", "1"]}
    monkeypatch.setenv("EBBTIDE_URL", url_of(tiny))
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello!\n"))
    statuses = {" ".join(argv): cli.main([*argv, *short.get(argv[0], ())]) for argv in commands}
    assert statuses == dict.fromkeys(statuses, 0), capsys.readouterr().err
    assert len(statuses) == 10


@pytest.mark.parametrize("is_local", [True, False], ids=["shared memory", "in the request"])
def test_a_client_updates_from_tensors(tiny: Server, is_local: bool) -> None:
    with Client(url_of(tiny)) as client:
        client.update_weights_from_disk("tiny", weight_version="calm")
        before = client.check_weights()["ranks"]
        client.update_weights_from_disk("tiny-storm", weight_version="wild")
        assert client.check_weights()["ranks"] != before
        # As from another host: nothing is shared with the server.
        client._is_local = is_local
        weights = load_file(folder_of("tiny") / "model.safetensors")
        assert client.update_weights_from_tensor(weights.items(), weight_version="again")["committed"]
        assert client.check_weights()["ranks"] == before
        with pytest.raises(RequestRejected, match="no_such_name"):
            client.update_weights_from_tensor([("no_such_name", weights["model.norm.weight"])])
        assert client.weight_version == "again"


def _text(picture: Any) -> str:
    from rich.console import Console

    console = Console(width=200)
    with console.capture() as captured:
        console.print(picture)
    return captured.get()
