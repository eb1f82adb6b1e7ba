"""`Client`: the methods of `Engine` over HTTP, and its errors where a server refuses, fails or goes away."""

import asyncio
import inspect
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from fixtures.servers import Server, free_port, null_server, url_of, wait_until

from ebbtide import Client, Engine, SamplingParams
from ebbtide.client import ServerUnreachable
from ebbtide.srt.errors import EngineError, RequestRejected

PROMPT = [1, 2, 3]
GREEDY = {"max_new_tokens": 4, "sampling_seed": 1}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    keys = ("--api-key", "user", "--admin-api-key", "admin")
    with null_server("--weight-version", "0", "--enable-metrics", *keys, is_ready=False) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Client]:
    with Client(url_of(server), api_key="user", admin_api_key="admin") as client:
        server.wait_ready()
        yield client


def public_methods(kind: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(kind, callable) if not name.startswith("_")}


def test_it_has_the_methods_of_engine() -> None:
    of_the_process = {"serve_dashboard", "serve_http", "shutdown", "async_shutdown"}
    of_the_client = {"close", "tokenize", "async_tokenize", "events", "async_events"}
    of_the_client |= {"pull_weights", "async_pull_weights"}
    assert public_methods(Engine) - of_the_process == public_methods(Client) - of_the_client


def test_a_step_of_reinforcement_learning(client: Client) -> None:
    before = client.generate(input_ids=PROMPT, sampling_params=SamplingParams(**GREEDY))
    assert before["meta_info"]["weight_version"] == client.weight_version
    freed = client.release_memory_occupation()["freed_bytes"]
    assert freed["weights"] > 0
    assert client.memory_occupation()["can_run"] is False
    client.resume_memory_occupation(["weights"])
    client.update_weights_from_disk("5", weight_version="5")
    client.resume_memory_occupation(tags=["kv_cache", "cuda_graph"])
    after = client.generate(input_ids=[PROMPT, PROMPT], sampling_params=GREEDY)
    assert [one["meta_info"]["weight_version"] for one in after] == ["5", "5"]
    assert client.abort_request("nobody")["num_aborted"] == 0
    assert client.model_info()["weight_version"] == "5"
    assert client.server_info()["weight_version"] == "0"
    assert len(client.loads()["loads"]) == 1
    assert client.metrics()["ebbtide:request_params_max_tokens_sum"] >= 8


def test_a_session_that_an_exception_leaves_is_discarded(client: Client) -> None:
    def update() -> None:
        with client.weight_update(weight_version="no"):
            client.update_weights_from_disk("6")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        update()
    assert client.weight_version != "no"


def test_streams_are_read_in_threads_and_in_loops(client: Client) -> None:
    asked = {"input_ids": PROMPT, "sampling_params": GREEDY}
    whole = client.generate(**asked)["output_ids"]

    async def read() -> list[Any]:
        return [chunk async for chunk in await client.async_generate(**asked, stream=True)]

    assert asyncio.run(read())[-1]["output_ids"] == whole
    assert list(client.generate(**asked, stream=True))[-1]["output_ids"] == whole


def test_a_refusal_is_that_of_engine(client: Client) -> None:
    with pytest.raises(RequestRejected, match="begin_weight_update first") as caught:
        client.end_weight_update(weight_version="9")
    assert caught.value.status == 409
    with pytest.raises(RequestRejected, match="max_new_tokens"):
        client.generate(input_ids=PROMPT, sampling_params={"max_new_tokens": -1})
    with pytest.raises(RequestRejected, match="max_new_tokens"):
        list(client.generate(input_ids=PROMPT, sampling_params={"max_new_tokens": -1}, stream=True))


@pytest.mark.parametrize(("status", "error"), [(409, RequestRejected), (500, EngineError)])
def test_an_error_in_the_middle_of_a_stream_is_of_its_status(status: int, error: type[Exception]) -> None:
    event = json.dumps({"error": {"message": "these weights are gone", "code": status}})
    transport = httpx.MockTransport(lambda _: httpx.Response(200, text=f"data: {event}\n\ndata: [DONE]\n\n"))
    with Client("http://host.invalid") as client:
        client._http = httpx.AsyncClient(base_url=client.url, transport=transport)
        with pytest.raises(error, match="are gone"):
            list(client.generate("a", stream=True))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"status": 404, "error": "Not Found", "message": "no such route"}', "^no such route$"),
        ('{"message": null, "error": "nobody"}', r"^http://host.invalid/\S+ answers 404: b'.*nobody"),
        ("[1]", r"^http://host.invalid/\S+ answers 404: b'\[1\]'$"),
    ],
)
def test_what_a_gateway_answers_is_told(text: str, told: str) -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(404, text=text))
    with Client("http://host.invalid") as client:
        client._http = httpx.AsyncClient(base_url=client.url, transport=transport)
        with pytest.raises(RequestRejected, match=told) as caught:
            client.continue_generation()
    assert caught.value.status == 404


def test_where_no_server_is_the_error_names_the_url() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with Client(url) as client, pytest.raises(ServerUnreachable, match=f"{url} .*ebbtide serve"):
        client.model_info()


def test_a_wrong_key_is_named(server: Server, client: Client) -> None:
    with (
        Client(url_of(server), api_key="user") as user,
        pytest.raises(RequestRejected, match="key") as caught,
    ):
        user.pause_generation("in_place")
    assert caught.value.status in (401, 403)


# The last one: the server is gone after it.
def test_a_server_that_goes_away_in_the_middle_of_a_stream_is_an_error(
    server: Server, client: Client
) -> None:
    client.pause_generation("in_place")
    stream = client.generate(input_ids=PROMPT, sampling_params=GREEDY, stream=True)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(list, stream)
        wait_until(lambda: client.loads()["loads"][0]["num_waiting_reqs"] == 1, "the server has it")
        server.process.kill()
        with pytest.raises(EngineError, match="went away"):
            reading.result()
