"""sglang-router in front of two servers, as rollouts reach them. Skipped where it is not installed."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from fixtures.checkpoints import make_checkpoint
from fixtures.deadlines import HANG_S
from fixtures.servers import Server, free_port, running_server, url_of, wait_until

if find_spec("sglang_router") is None:
    pytest.skip("sglang-router is not installed", allow_module_level=True)

PROMPT = [5, 6, 7]
GREEDY = {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True}
ENDLESS = {**GREEDY, "max_new_tokens": 100_000}
OPTIONS = ("--policy", "round_robin", "--health-check-interval-secs", "1", "--health-failure-threshold", "2")
OPTIONS += ("--health-check-timeout-secs", str(int(HANG_S)))


@dataclass
class Router:
    """The router, and the servers it was given."""

    client: httpx.Client
    servers: list[Server]

    def generate(self, parameters: dict[str, Any] = GREEDY, **fields: Any) -> httpx.Response:
        body = {"input_ids": PROMPT, "sampling_params": parameters, **fields}
        return self.client.post("/generate", json=body)

    def workers(self) -> dict[str, bool]:
        """Whether each is healthy, by address."""
        found = self.client.get("/workers").json()["workers"]
        return {worker["url"]: worker["is_healthy"] for worker in found}


def num_requests(server: Server) -> int:
    return int(server.get("/get_load").json()[0]["num_reqs"])


@contextmanager
def running_router(servers: list[Server], log: Path) -> Iterator[Router]:
    """The router in a process of its own, given the first server at its start and the others by a request."""
    port = free_port()
    command = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", *OPTIONS]
    command += ["--port", str(port), "--prometheus-port", str(free_port())]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--worker-urls", url_of(servers[0])], stdout=output, stderr=output
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=HANG_S) as client:
            router = Router(client, servers)

            def is_up() -> bool:
                assert process.poll() is None, log.read_text()
                try:
                    return client.get("/readiness").status_code == 200
                except httpx.TransportError:
                    return False

            wait_until(is_up, "the router has a worker")
            for server in servers[1:]:
                answer = client.post("/workers", json={"url": url_of(server), "worker_type": "regular"})
                assert answer.status_code == 202, answer.text
            wait_until(lambda: sum(router.workers().values()) == len(servers), "the router has all workers")
            yield router
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    folder = tmp_path_factory.mktemp("router")
    model = make_checkpoint(folder / "model", "LlamaForCausalLM", max_position_embeddings=1 << 17)
    with ExitStack() as stack:
        options = ("--served-model-name", "tiny", "--max-total-tokens", str(1 << 17))
        servers = [stack.enter_context(running_server(model, *options, is_ready=False)) for _ in range(2)]
        for server in servers:
            server.wait_ready()
        yield stack.enter_context(running_router(servers, folder / "log"))


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as executor:
        yield executor


def wait_running(router: Router, counts: list[int]) -> None:
    wait_until(lambda: [num_requests(server) for server in router.servers] == counts, f"{counts} run")


def test_an_answer_is_that_of_the_server(router: Router) -> None:
    parameters = {**GREEDY, "temperature": 0.7, "top_k": 20, "sampling_seed": 2**62 + 1}
    fields = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    body = {"input_ids": PROMPT, "sampling_params": parameters, **fields}
    direct = router.servers[0].post("/generate", body).json()
    for number in range(4):  # both servers, twice
        routed = router.generate(parameters, rid=f"routed-{number}", **fields).json()
        assert routed["output_ids"] == direct["output_ids"]
        assert routed["meta_info"]["id"] == f"routed-{number}"
        for key in ("output_token_logprobs", "input_token_logprobs", "weight_versions", "finish_reason"):
            assert routed["meta_info"][key] == direct["meta_info"][key]
    refused = router.generate({"temperature": -1})
    assert refused.status_code == 400
    assert "temperature" in refused.json()["message"]


def test_a_stream(router: Router) -> None:
    events = router.generate(stream=True).text.strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    last = msgspec.json.decode(events[-2].removeprefix("data: "))
    # Tokens that come while the client has not read those before share an event.
    assert 2 < len(events) <= GREEDY["max_new_tokens"] + 1
    assert last["output_ids"] == router.generate().json()["output_ids"]
    assert last["meta_info"]["finish_reason"]["type"] == "length"


def test_openai_and_information(router: Router) -> None:
    messages = [{"role": "user", "content": "hi"}]
    body = {"model": "tiny", "messages": messages, "max_tokens": 3, "ignore_eos": True, "temperature": 0}
    chat = router.client.post("/v1/chat/completions", json=body).json()
    assert chat["usage"]["completion_tokens"] == 3
    direct = router.servers[0].post("/v1/chat/completions", body).json()
    assert chat["choices"] == direct["choices"]
    events = router.client.post("/v1/chat/completions", json={**body, "stream": True}).text
    assert events.strip().endswith("data: [DONE]")
    assert [card["id"] for card in router.client.get("/v1/models").json()["data"]] == ["tiny"]
    assert router.client.get("/get_model_info").json()["weight_version"] == "default"
    loads = router.client.get("/get_loads").json()["workers"]
    assert {load["worker"]: load["load"] for load in loads} == dict.fromkeys(router.workers(), 0)
    flushed = router.client.post("/flush_cache").json()
    assert flushed["status"] == "success", flushed


def test_requests_wait_for_a_server_that_sleeps(router: Router, pool: ThreadPoolExecutor) -> None:
    asleep, awake = router.servers
    asleep.post("/release_memory_occupation")
    answers = [pool.submit(router.generate) for _ in range(4)]
    wait_until(lambda: sum(answer.done() for answer in answers) == 2, "the other server has answered")
    wait_until(lambda: num_requests(asleep) == 2, "two wait")
    num_checks = asleep.log.count("GET /health ")
    # As many as would make it unhealthy.
    wait_until(lambda: asleep.log.count("GET /health ") >= num_checks + 3, "it is asked three times")
    assert all(router.workers().values())
    asleep.post("/resume_memory_occupation", {"tags": ["weights"]})
    model = asleep.get("/model_info").json()["model_path"]
    for server in router.servers:
        body = {"model_path": model, "weight_version": "1"}
        assert server.post("/update_weights_from_disk", body).status_code == 200
    asleep.post("/resume_memory_occupation")
    finished = [answer.result().json()["meta_info"] for answer in answers]
    assert sorted(meta_info["weight_version"] for meta_info in finished) == ["1", "1", "default", "default"]
    assert {meta_info["finish_reason"]["type"] for meta_info in finished} == {"length"}
    assert num_requests(awake) == 0


def test_a_client_that_leaves_has_its_request_ended(router: Router) -> None:
    body = msgspec.json.encode({"input_ids": PROMPT, "sampling_params": ENDLESS})
    head = "POST /generate HTTP/1.1\r\nHost: router\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", router.client.base_url.port or 0)) as client:
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_until(lambda: sum(map(num_requests, router.servers)) == 1, "it runs")
    wait_running(router, [0, 0])
    assert router.generate().status_code == 200


# The last one: a server is gone after it.
def test_what_a_dead_server_had_is_done_by_the_other(router: Router, pool: ThreadPoolExecutor) -> None:
    long = {**GREEDY, "max_new_tokens": 1500}
    answers = [pool.submit(router.generate, long) for _ in range(4)]
    wait_running(router, [2, 2])
    dead, alive = router.servers
    dead.process.kill()
    results = [answer.result() for answer in answers]
    assert [result.status_code for result in results] == [200] * 4
    assert len({tuple(result.json()["output_ids"]) for result in results}) == 1
    wait_until(lambda: router.workers() == {url_of(dead): False, url_of(alive): True}, "it is noticed")
    assert [router.generate().status_code for _ in range(4)] == [200] * 4
