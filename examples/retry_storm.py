"""Two clients that repeat themselves and get in each other's way: nothing dies, and the states are as said.

    PYTHONPATH=compat:python python examples/retry_storm.py [--url URL --model-path FOLDER]

Repeated requests change nothing the second time. Of two pauses at once the stronger one is in force, whoever
came first. Then both clients send whatever comes to their minds; every request is answered, and afterwards
the same processes give the same tokens. Source: sequence 6 of the contract. Needs `requests`.
"""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import served_engine
import tiny_rl
from served_engine import Refused, ServedEngine, expect

NUM_REQUESTS = 40
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/release_memory_occupation", {}),
    ("/release_memory_occupation", {"tags": ["kv_cache"]}),
    ("/resume_memory_occupation", {}),
    ("/resume_memory_occupation", {"tags": ["weights"]}),
    ("/pause_generation", {"mode": "abort"}),
    ("/pause_generation", {"mode": "retract"}),
    ("/pause_generation", {"mode": "in_place"}),
    ("/continue_generation", {}),
    ("/flush_cache", {}),
    ("/begin_weight_update", {}),
    ("/end_weight_update", {}),
    ("/abort_request", {"abort_all": True}),
]


def pids(engine: ServedEngine) -> list[int]:
    """Of the processes of all ranks."""
    return [rank["pid"] for rank in engine.get("/memory_occupation")["ranks"]]


def both(engine: ServedEngine, *requests: tuple[str, dict[str, Any]]) -> list[Any]:
    """The replies to requests that are made at once."""
    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(lambda request: engine.post(*request), requests))


def repeat(engine: ServedEngine) -> None:
    """Each of these twice, at once and one after the other."""
    print("requests that are repeated:", flush=True)
    reply = engine.post("/resume_memory_occupation")
    expect("resume before any release: success, nothing changed", not reply["changed"])
    reply = engine.post("/continue_generation")
    expect("continue while running: success, nothing changed", not reply["changed"])
    release: tuple[str, dict[str, Any]] = ("/release_memory_occupation", {"tags": ["kv_cache"]})
    resume: tuple[str, dict[str, Any]] = ("/resume_memory_occupation", {"tags": ["kv_cache"]})
    for name, request in (("release", release), ("resume", resume)):
        changed = sum(reply["changed"] for reply in both(engine, request, request))
        expect(f"{name}, twice at once: success, and one of the two did it", changed == 1)
        expect(f"{name}, once more: success, nothing changed", not engine.post(*request)["changed"])


def pause_at_once(engine: ServedEngine) -> None:
    """Different modes: they only escalate."""
    print("two clients that pause at once, while rollouts run:", flush=True)
    for weaker, stronger in (("in_place", "retract"), ("retract", "abort"), ("in_place", "abort")):
        both(engine, ("/pause_generation", {"mode": weaker}), ("/pause_generation", {"mode": stronger}))
        state = engine.get("/memory_occupation")["generation"]
        expect(f"{weaker} and {stronger}: {state['mode']} is in force", state["mode"] == stronger)
        continued = sum(reply["changed"] for reply in both(engine, *[("/continue_generation", {})] * 2))
        expect("continue, twice at once: success, and one of the two did it", continued == 1)


def refuse(engine: ServedEngine) -> None:
    print("requests that are wrong:", flush=True)
    try:
        engine.post("/release_memory_occupation", {"tags": ["kv_cache", "everything"]})
    except Refused as refused:
        states = {tag: state["state"] for tag, state in engine.get("/memory_occupation")["tags"].items()}
        expect(f"{refused}", set(states.values()) == {"resident"})
    else:
        expect("an unknown tag is refused", False)


def storm(engine: ServedEngine) -> None:
    """Both clients at random, each with a seed of its own."""

    def client(seed: int) -> Counter[int]:
        chosen = random.Random(seed)
        statuses: Counter[int] = Counter()
        for _ in range(NUM_REQUESTS):
            try:
                engine.post(*chosen.choice(REQUESTS))
                statuses[200] += 1
            except Refused as refused:
                statuses[refused.status] += 1
        return statuses

    print("a storm of both:", flush=True)
    with ThreadPoolExecutor(2) as pool:
        statuses = sum(pool.map(client, (1, 2)), Counter[int]())
    # A second `begin`, an `end` without one, an update of nothing: refused, which is an answer.
    is_answered = statuses.total() == 2 * NUM_REQUESTS and statuses.keys() <= {200, 400, 409}
    expect(f"{statuses.total()} requests, answered {dict(sorted(statuses.items()))}", is_answered)


def run(engine: ServedEngine, model_path: Path) -> None:
    from_disk = {"model_path": str(model_path), "weight_version": "0"}
    engine.post("/update_weights_from_disk", from_disk)
    before, started = engine.greedy(), pids(engine)
    repeat(engine)
    with ThreadPoolExecutor(1) as pool:
        # Batches that are aborted return with what they have; the requests of this one are many and long.
        body = {
            "input_ids": [tiny_rl.PROMPT] * 16,
            "sampling_params": {**tiny_rl.SAMPLING, "max_new_tokens": 200},
        }
        batch = pool.submit(engine.post, "/generate", body)
        pause_at_once(engine)
        ends = Counter(output["meta_info"]["finish_reason"]["type"] for output in batch.result())
        expect(f"the rollouts were all answered: {dict(ends)}", ends.total() == len(body["input_ids"]))
    refuse(engine)
    storm(engine)
    engine.post("/abort_weight_update")
    engine.post("/resume_memory_occupation")
    engine.post("/continue_generation")
    engine.post("/update_weights_from_disk", from_disk)
    print("afterwards:", flush=True)
    expect("the same processes run", pids(engine) == started)
    expect("they give the same tokens", engine.greedy() == before)


if __name__ == "__main__":
    served_engine.main(__doc__, run)
