"""Every endpoint of a real server with a real model, as a client sees it, bad input included."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fixtures.checkpoints import VOCAB_SIZE
from fixtures.servers import Server, wait_until

from ebbtide.srt.entrypoints.routes import NOT_IMPLEMENTED

GREEDY = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
ENDLESS = {"temperature": 0, "max_new_tokens": None, "ignore_eos": True}


def events(lines: Iterator[str]) -> Iterator[Any]:
    """The chunks of a stream of server-sent events; checks that it ends as it should."""
    for line in lines:
        if line == "data: [DONE]":
            return
        if line:
            yield json.loads(line.removeprefix("data: "))
    raise AssertionError("the stream has ended without [DONE]")


def num_requests(server: Server) -> int:
    """How many requests the scheduler has, while generation is paused in place."""
    body = server.post("/pause_generation", {"mode": "in_place"}).json()
    return int(body["num_running"] + body["num_queued"])


def connect(server: Server) -> socket.socket:
    url = server.client.base_url
    return socket.create_connection((url.host, url.port))


def assert_error(response: Any, status: int, message: str) -> None:
    assert response.status_code == status, response.text
    body = response.json()
    assert body["success"] is False
    assert message in body["message"]
    assert body["error"]["message"] == body["message"]
    assert body["error"]["code"] == status


# -------------------------------------------------------------------------------------------- disconnects


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_has_its_request_aborted(server: Server, stream: bool) -> None:
    server.post("/pause_generation", {"mode": "in_place"})
    body = json.dumps({"text": "tide", "sampling_params": ENDLESS, "stream": stream}).encode()
    with connect(server) as connection:
        head = f"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        wait_until(lambda: num_requests(server) == 1, "the request waits")
    wait_until(lambda: num_requests(server) == 0, "the request is aborted")


@pytest.mark.parametrize(("stream", "begins"), [(1, "data: "), ("true", "data: "), ("no", "{"), (0, "{")])
def test_a_stream_is_asked_for_in_any_form_of_true(server: Server, stream: object, begins: str) -> None:
    params = {"max_new_tokens": 1}
    answer = server.post("/generate", {"text": "tide", "sampling_params": params, "stream": stream})
    assert answer.text.startswith(begins)


def test_a_control_request_outlives_its_client(server: Server, checkpoints: Any) -> None:
    generating = {"text": "tide", "sampling_params": ENDLESS, "stream": True}
    update = json.dumps({"model_path": str(checkpoints.b), "weight_version": "late"}).encode()
    head = (
        f"POST /update_weights_from_disk HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(update)}\r\n\r\n"
    )
    with server.client.stream("POST", "/generate", json=generating) as response:
        chunks = events(response.iter_lines())
        next(chunks)
        # The update waits for the stream to end, and its client does not wait for the update.
        with connect(server) as connection:
            connection.sendall(head.encode() + update)
        assert server.get("/get_weight_version").json()["weight_version"] == "default"
    wait_until(
        lambda: server.get("/get_weight_version").json()["weight_version"] == "late", "the update is done"
    )


# ------------------------------------------------------------------------------------- memory and pausing


def test_a_flush_is_400_while_requests_hold_kv(server: Server) -> None:
    response = server.post(
        "/generate", {"text": "longer than one page of the cache", "sampling_params": GREEDY}
    )
    assert response.is_success
    assert server.get("/flush_cache").json()["freed_tokens"] > 0
    body = {"text": "tide", "sampling_params": ENDLESS, "stream": True}
    with server.client.stream("POST", "/generate", json=body) as response:
        chunks = events(response.iter_lines())
        next(chunks)
        assert num_requests(server) == 1
        refused = server.get("/flush_cache?timeout=0.1")
        assert_error(refused, 400, "1 requests still hold KV")
        assert refused.json()["fully_flushed"] is False
        server.post("/pause_generation", {"mode": "retract"})
        assert server.post("/flush_cache").json()["fully_flushed"] is True


# -------------------------------------------------------------------------------------------- information


def test_the_model_and_the_server_are_described(server: Server, checkpoints: Any) -> None:
    info = server.get("/get_model_info").json()
    assert info == server.get("/model_info").json()
    assert (info["model_type"], info["architectures"]) == ("qwen3", ["Qwen3ForCausalLM"])
    assert (info["context_len"], info["vocab_size"], info["dtype"]) == (2048, VOCAB_SIZE, "float32")
    assert info["precision"] == {"weights": "float32", "kv_cache": "float32"}
    described = server.get("/get_server_info").json()
    assert (described["model_path"], described["max_queued_requests"]) == (str(checkpoints.a), 8)
    assert (described["status"], described["max_total_num_tokens"]) == ("ready", 4096)
    assert described["max_req_input_len"] == 2047
    assert described["api_key"] is None
    # Left open on the command line.
    assert (described["page_size"], described["device"], described["context_length"]) == (16, "cpu", 2048)
    assert described["attention_backend"] == "torch_native"
    assert (described["dtype"], described["kv_cache_dtype"]) == ("float32", "float32")
    startup_time = described["startup_time"]
    assert 0 < startup_time["scheduler_e2e"] < startup_time["tokenizer_e2e"]
    state = server.get("/memory_occupation").json()
    assert described["state"]["tags"] == state["tags"]
    assert "ranks" not in described["state"]
    [replica] = described["internal_states"]
    assert replica["memory_usage"]["weight"] * 2**30 == state["tags"]["weights"]["resident_bytes"]


def test_only_the_scheduler_has_torch(server: Server) -> None:
    """It is most of the start of what computes nothing. Where there is a driver, a server asks torch."""
    pids = {"server": server.process.pid, **server.children()}
    having = {name for name, pid in pids.items() if "libtorch" in Path(f"/proc/{pid}/maps").read_text()}
    # The scheduler has torch's process for shared memory, whose last argument is a number.
    having = {name for name in having if not name.isdecimal()}
    assert having - ({"server"} if Path("/dev/nvidiactl").exists() else set()) == {"scheduler"}


def test_no_page_shows_an_answer_in_a_frame(server: Server) -> None:
    for path in ("/docs", "/dashboard", "/get_weight_version"):
        policies = server.get(path).headers.get_list("Content-Security-Policy")
        assert any("frame-ancestors 'none'" in policy for policy in policies), path


# ---------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nope", 404),
        ("POST", "/health", 405),
        ("DELETE", "/flush_cache", 405),
        *(("POST", path, 501) for path in NOT_IMPLEMENTED),
        ("GET", "/start_profile", 501),
    ],
)
def test_unknown_paths_and_methods_answer_in_the_one_shape(
    server: Server, method: str, path: str, status: int
) -> None:
    assert_error(server.client.request(method, path), status, path)


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/update_weights_from_tensor"), ("POST", "/transition"), ("PUT", "/generate")],
)
def test_a_malformed_body_is_refused(server: Server, method: str, path: str) -> None:
    for body in (b"{", b"[]", b"1", b"\xff"):
        assert_error(server.client.request(method, path, content=body), 400, "expected a JSON object")
