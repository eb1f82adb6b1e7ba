"""A server that is to end serves what is in first: by a request, or by a signal. Without a model."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest
from fixtures.servers import Server, is_alive, null_server, wait_until

from ebbtide.srt.entrypoints.http_server import ONE_STOP_S

PROMPT = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 4}}


@contextmanager
def server_with_a_request() -> Iterator[tuple[Server, Callable[[], httpx.Response]]]:
    """A server in which a request waits; the second is what gets its answer."""
    with null_server("--drain-timeout-s", "60") as server, ThreadPoolExecutor(1) as pool:
        server.post("/pause_generation", {"mode": "in_place"})
        waiting = pool.submit(server.post, "/generate", PROMPT)
        wait_until(lambda: server.get("/get_load").json()[0]["num_reqs"] == 1, "the request waits")
        yield server, waiting.result


def by_request(server: Server) -> None:
    for timeout_s in ("-1", '"soon"', "true"):
        refused = server.client.post("/drain", content=f'{{"timeout_s": {timeout_s}}}')
        assert refused.status_code == 400
        assert "timeout_s" in refused.json()["message"]
    assert server.get("/ready").json()["message"] == "paused(in_place)"
    reply = server.post("/drain", {"timeout_s": 60})
    assert reply.json() == {"success": True, "message": "1 requests are served to their end.", "num_live": 1}


def by_signal(server: Server) -> None:
    """As `timeout` sends it: to the server, and then to every process of its group."""
    for pid in (server.process.pid, server.process.pid, *server.children().values()):
        os.kill(pid, signal.SIGTERM)
    wait_until(
        lambda: server.get("/ready").json()["message"].startswith("the server is draining"), "it drains"
    )


def test_what_is_in_is_served_and_nothing_else() -> None:
    with server_with_a_request() as (server, answer):
        by_request(server)
        for path, body in (("/generate", PROMPT), ("/v1/completions", {"prompt": [1]})):
            refused = server.post(path, body)
            assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
            assert "the server is draining" in refused.json()["message"]
        assert server.get("/ready").status_code == 503
        assert server.get("/health").status_code == server.get("/health_generate").status_code == 200
        server.post("/continue_generation")
        assert len(answer().json()["output_ids"]) == 4
        assert server.process.wait() == 0
        assert "Traceback" not in server.log


def by_its_limit(server: Server) -> None:
    server.post("/drain", {"timeout_s": 0.1})


def by_a_later_signal(server: Server) -> None:
    by_signal(server)
    time.sleep(ONE_STOP_S)
    server.process.terminate()


@pytest.mark.parametrize("end", [by_its_limit, by_a_later_signal])
def test_what_cannot_end_is_answered_all_the_same(end: Callable[[Server], None]) -> None:
    with server_with_a_request() as (server, answer):
        children = server.children()
        end(server)
        assert answer().status_code == 503
        assert server.process.wait() == 0
        assert not any(is_alive(pid) for pid in children.values())
        assert not server.sockets
