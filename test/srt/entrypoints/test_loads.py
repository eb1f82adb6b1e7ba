"""`/v1/loads` and `/get_load`: what every replica has to do, told as soon as it is so."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fixtures.servers import Server, wait_until

ENDLESS = {"temperature": 0, "max_new_tokens": None, "ignore_eos": True}
COUNTS = ("num_running_reqs", "num_paused_reqs", "num_waiting_reqs")


def load(server: Server, query: str = "") -> Any:
    response = server.get(f"/v1/loads{query}")
    assert response.status_code == 200, response.text
    [only] = response.json()["loads"]
    return only


def counts(server: Server) -> list[int]:
    """Running, paused and waiting requests."""
    told = load(server)
    return [told[name] for name in COUNTS]


def test_requests_are_counted_where_they_stand(server: Server) -> None:
    assert counts(server) == [0, 0, 0]
    with ThreadPoolExecutor(2) as pool:
        body = {"text": "tide" * 20, "sampling_params": ENDLESS}
        # Waiting: nothing is admitted while generation is paused.
        server.post("/pause_generation", {"mode": "in_place"})
        running = [pool.submit(server.post, "/generate", body) for _ in range(2)]
        wait_until(lambda: counts(server) == [0, 0, 2], "two requests wait")
        assert load(server)["num_total_tokens"] == 2 * 80
        server.post("/continue_generation")
        wait_until(lambda: counts(server) == [2, 0, 0], "they run")
        # In place they keep their KV, and do not count as running: clients poll for "none running".
        server.post("/pause_generation", {"mode": "in_place"})
        paused = load(server)
        assert [paused[name] for name in COUNTS] == [0, 2, 0]
        assert paused["num_total_reqs"] == 2
        assert 80 < paused["num_used_tokens"] <= paused["num_total_tokens"] <= paused["max_total_num_tokens"]
        [short] = server.get("/get_load").json()
        counted = {name: paused[name] for name in COUNTS}
        assert short == {"dp_rank": 0, "num_reqs": 2, "num_tokens": paused["num_total_tokens"], **counted}
        server.post("/pause_generation", {"mode": "retract"})
        retracted = load(server)
        assert [retracted[name] for name in COUNTS] == [0, 0, 2]
        assert retracted["num_used_tokens"] == 0
        server.post("/abort_request", {"abort_all": True})
        assert counts(server) == [0, 0, 0]
        assert {future.result().status_code for future in running} == {200}


def test_the_rate_stays_known_when_the_engine_is_idle(server: Server) -> None:
    def last_rate() -> float:
        [replica] = server.get("/server_info").json()["internal_states"]
        return float(replica["last_gen_throughput"])

    body = {"text": "tide", "sampling_params": {**ENDLESS, "max_new_tokens": 200}}
    assert server.post("/generate", body).is_success
    wait_until(lambda: last_rate() > 0, "the rate is known")
    wait_until(lambda: load(server)["gen_throughput"] == 0, "the engine has been idle for a while")
    assert last_rate() > 0


def test_sections_and_replicas_can_be_chosen(server: Server) -> None:
    assert not {"memory", "queues"} & load(server).keys()
    assert not {"memory", "queues"} & load(server, "?include=core,spec").keys()
    assert load(server, "?include=memory&include=queues&dp_rank=0").keys() > {"memory", "queues"}
    assert load(server, "?include=all").keys() > {"memory", "queues"}
    body = server.get("/v1/loads").json()
    assert (body["num_accelerators"], body["aggregate"]["total_reqs"]) == (1, 0)
