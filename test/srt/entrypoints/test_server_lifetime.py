"""How servers start, fail to start, die and stop: what is answered, said, and left behind."""

import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import psutil
import pytest
from fixtures.deadlines import HANG_S
from fixtures.servers import (
    Server,
    free_port,
    is_alive,
    null_server,
    running_server,
    wait_until,
)

from ebbtide.srt.config import EngineConfig
from ebbtide.srt.entrypoints.http_server import serve
from ebbtide.srt.entrypoints.launch.console import Stopped
from ebbtide.srt.errors import ConfigurationError
from ebbtide.srt.server_args import ServerArgs
from ebbtide.testing.null_engine import TARGETS
from ebbtide.testing.null_runner import null_args, null_config

WAITING = {"input_ids": [5], "sampling_params": {"max_new_tokens": 4}}


# ------------------------------------------------------------------------------------------- failing starts


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"host": "no.such.host.invalid", "allow_unauthenticated_control": True}, "no.such.host.invalid"),
        ({}, "cannot listen on 127.0.0.1 port .*: Address already in use"),
    ],
)
def test_an_address_that_does_not_do_is_refused_before_anything_starts(
    arguments: dict[str, Any], message: str
) -> None:
    before = psutil.Process().children()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        args = null_args(port=taken.getsockname()[1], **arguments)
        with pytest.raises(ConfigurationError, match=message):
            serve(lambda: null_config(args), TARGETS)
    assert set(psutil.Process().children()) <= set(before)


# ---------------------------------------------------------------------------------------------------- deaths


def test_a_process_that_dies_takes_the_server_down() -> None:
    with null_server() as server, ThreadPoolExecutor(2) as pool:
        children = server.children()
        server.post("/pause_generation", {"mode": "in_place"})
        waiting = pool.submit(server.post, "/generate", WAITING)
        stream = pool.submit(server.post, "/generate", {**WAITING, "stream": True})
        wait_until(lambda: num_waiting(server) == 2, "both requests wait")
        os.kill(children["scheduler"], signal.SIGKILL)
        assert server.process.wait() == 1
        answer = waiting.result()
        assert answer.status_code == 503
        said = answer.json()["message"]
        assert said.startswith("the scheduler process was ended by SIGKILL")
        assert "memory" in said
        assert said in stream.result().text
        assert '"code":503' in stream.result().text
        assert stream.result().text.endswith("data: [DONE]\n\n") or stream.result().status_code == 503
        assert server.log.splitlines()[-1] == said
        assert not any(is_alive(pid) for pid in children.values())
        assert not server.sockets


def num_waiting(server: Server) -> int:
    return int(server.post("/pause_generation", {"mode": "in_place"}).json()["num_queued"])


# ---------------------------------------------------------------------------------------------------- stops


def test_a_stop_answers_what_waits_and_leaves_nothing() -> None:
    """Ctrl-C reaches every process of the foreground; of a signal to the server alone see test_drain.py."""
    with null_server() as server, ThreadPoolExecutor(1) as pool, unread_stream(server):
        children = server.children()
        server.post("/pause_generation", {"mode": "in_place"})
        waiting = pool.submit(server.post, "/generate", WAITING)
        wait_until(lambda: num_waiting(server) == 1, "the request waits")
        for pid in (server.process.pid, *children.values()):
            os.kill(pid, signal.SIGINT)
        assert server.process.wait() == 0
        assert waiting.result().status_code == 503
        assert waiting.result().json()["message"] == "the server is shutting down"
        assert not any(is_alive(pid) for pid in children.values())
        assert not server.sockets
        assert "Traceback" not in server.log
        assert " ERROR " not in server.log


@contextmanager
def unread_stream(server: Server) -> Iterator[None]:
    """Within, a client has asked for megabytes and does not read them."""
    url = server.client.base_url
    fields = {"input_ids": [1], "stream": True, "return_logprob": True, "top_logprobs_num": 20}
    body = json.dumps({**fields, "sampling_params": {"max_new_tokens": 2000}})
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((url.host, url.port))
        head = f"POST /generate HTTP/1.1\r\nHost: {url.host}\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(f"{head}{body}".encode())
        assert client.recv(8) == b"HTTP/1.1"
        wait_until(lambda: server.get("/get_load").json()[0]["num_reqs"] == 0, "all of it is there")
        yield


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_stop_before_the_server_has_imported_anything_ends_the_ranks_too(
    checkpoints: Any, number: int, status: int
) -> None:
    # Which are there by then, and import for many seconds.
    with running_server(checkpoints.a, "--tp", "2", is_ready=False) as server:
        wait_until(lambda: len(psutil.Process(server.process.pid).children()) == 2, "the ranks import")
        ranks = psutil.Process(server.process.pid).children()
        assert server.stop(number) == status
        wait_until(lambda: not any(is_alive(rank.pid) for rank in ranks), "the ranks have gone")
        assert "Traceback" not in server.log


def test_nobody_is_served_while_the_model_loads_and_a_stop_then_leaves_nothing(checkpoints: Any) -> None:
    with running_server(checkpoints.a, is_ready=False) as server:
        wait_until(lambda: bool(server.sockets), "the processes start")
        # However long this test gets no turn, the model is not there before.
        scheduler = server.children()["scheduler"]
        os.kill(scheduler, signal.SIGSTOP)
        with pytest.raises(httpx.ConnectError):
            server.get("/health")
        server.process.terminate()
        # A stop that is lost in a callback is taken up when the start ends.
        with suppress(ProcessLookupError):
            os.kill(scheduler, signal.SIGCONT)
        assert server.process.wait() == 130
        assert not server.sockets
        assert "Traceback" not in server.log


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("waits", [True, False])
def test_a_stop_that_is_lost_in_a_callback_stops_the_start_all_the_same(
    capfd: pytest.CaptureFixture[str], waits: bool
) -> None:
    class Noisy:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    def configure() -> EngineConfig:
        # What its end raises is reported, and goes no further.
        Noisy()
        if waits:
            threading.Event().wait(HANG_S)
            raise AssertionError("the start went on")
        return null_config(ServerArgs(model_path="null", skip_tokenizer_init=True, port=free_port()))

    before = psutil.Process().children()
    with pytest.raises(Stopped):
        serve(configure, TARGETS)
    # Other tests of this process may have left torch's helpers.
    assert set(psutil.Process().children()) <= set(before)
    assert "Traceback" not in capfd.readouterr().err
