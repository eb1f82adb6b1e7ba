"""Engines and a fleet of them as actors of a local cluster, with replicas that die."""

import asyncio
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from fixtures.adapters import make_adapter
from fixtures.references import Reference
from fixtures.servers import wait_until
from safetensors.torch import load_file

from ebbtide.ray import RayEngine, RayFleet, launch
from ebbtide.srt.errors import ConfigurationError, EngineError, RequestRejected

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 48, "ignore_eos": True}
PROMPTS = [[3, 1, 4, 1, 5], list(range(40)), [200], [7] * 20]
OPTIONS: dict[str, Any] = {"device": "cpu", "max_total_tokens": 4096, "skip_tokenizer_init": True}
TWO_NODES: dict[str, Any] = {**OPTIONS, "tp": 2, "nnodes": 2, "bundles": [{"CPU": 1}] * 2}


@pytest.fixture(scope="module")
def fleet(cluster: None, checkpoints: tuple[Path, Path]) -> Iterator[RayFleet]:
    with RayFleet(2, model_path=str(checkpoints[0]), enable_lora=True, max_lora_rank=8, **OPTIONS) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def references(checkpoints: tuple[Path, Path]) -> tuple[Reference, Reference]:
    first, second = map(Reference, checkpoints)
    return first, second


def checksums(fleet: RayFleet) -> set[str]:
    replies = fleet.check_weights()["replicas"].values()
    return {reply["per_engine_checksum"] for reply in replies}


def test_an_engine_in_an_actor_is_an_engine(fleet: RayFleet, references: tuple[Reference, Reference]) -> None:
    engine = fleet.engines[0]
    whole = engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)
    assert all(map(references[0].accepts, PROMPTS, [one["output_ids"] for one in whole]))
    chunks = list(engine.generate(input_ids=PROMPTS[0], sampling_params=GREEDY, stream=True))
    assert [token for chunk in chunks for token in chunk["output_ids"]] == whole[0]["output_ids"]
    with pytest.raises(RequestRejected, match="/nowhere") as caught:
        engine.update_weights_from_disk("/nowhere")
    assert caught.value.status == 400


def test_no_request_is_lost_with_its_replica(
    fleet: RayFleet,
    checkpoints: tuple[Path, Path],
    references: tuple[Reference, Reference],
    tmp_path: Path,
) -> None:
    """One dies in mid-rollout and in mid-update. What serves by then is on no disk: it was sent."""
    adapter = make_adapter(checkpoints[1], tmp_path)
    fleet.load_lora_adapter("policy", str(tmp_path))
    weights = list(load_file(checkpoints[1] / "model.safetensors").items())
    assert fleet.update_weights_from_tensor(weights, weight_version="1")["weight_version"] == "1"
    pids = [process.pid for process in processes_of(fleet.engines[1])]
    prompts, params = [*PROMPTS * 4, [9, 9]], {**GREEDY, "temperature": 1.0, "sampling_seed": 7}
    params |= {"max_new_tokens": 200, "presence_penalty": 0.5}
    uncut = [one["output_ids"] for one in fleet.generate(input_ids=prompts, sampling_params=params)]
    greedy = fleet.generate(input_ids=PROMPTS[0], sampling_params=GREEDY)
    assert references[1].accepts(PROMPTS[0], greedy["output_ids"])
    fleet.begin_weight_update()
    fleet.update_weights_from_tensor(weights)
    with ThreadPoolExecutor(1) as thread:
        rollout = thread.submit(fleet.generate, input_ids=prompts[:-1], sampling_params=params)
        wait_until(lambda: fleet.status()[1]["num_live"] > 0 or rollout.done(), "it has begun")
        stream = fleet.generate(input_ids=prompts[-1], sampling_params=params, stream=True)
        next(stream)
        ray.kill(fleet.engines[1].actor)
        wait_until(lambda: not fleet.status()[1]["serves"], "the fleet has heard of it")
        ended = fleet.end_weight_update("2", flush_cache=False, pause_mode="in_place")
        assert ended["replicas"].keys() == {"replica 0"}
        *_, last = stream
        answers = [*rollout.result(), last]
    assert [one["output_ids"] for one in answers] == uncut
    metas = [one["meta_info"] for one in answers]
    assert any(meta["num_moves"] for meta in metas)
    for meta in metas:
        assert meta["finish_reason"] == {"type": "length", "length": 200}
        assert [meta["weight_versions"][0]["start"], meta["weight_versions"][-1]["end"]] == [0, 200]
        assert [span["version"] for span in meta["weight_versions"]] in (["1"], ["1", "2"], ["2"])
    wait_until(lambda: not any(map(psutil.pid_exists, pids)), "its processes have gone")

    fleet.wait_for_all()
    assert [one["num_deaths"] for one in fleet.status()] == [0, 1]
    assert len(checksums(fleet)) == 1
    assert fleet.engines[1].weight_version == "2"
    answer = fleet.engines[1].generate(input_ids=PROMPTS[0], sampling_params=GREEDY, lora_path="policy")
    assert adapter.reference.accepts(PROMPTS[0], answer["output_ids"])
    done = fleet.update_weights_from_disk(str(checkpoints[0]), weight_version="3")
    assert [reply["weight_version"] for reply in done["replicas"].values()] == ["3", "3"]
    assert len(checksums(fleet)) == 1


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"tp": 8}, r"cannot be placed: it needs \{'CPU': 8.0\}, and the machines have .*'CPU': 4"),
        ({"tp": 2, "bundles": [{"CPU": 1}]}, "2 ranks need 0 GPU and 1 CPU each.*have room for 1"),
        ({"node_rank": 1}, "node_rank: not with Ray"),
    ],
)
def test_what_has_no_room_says_what_it_needs(cluster: None, options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        RayEngine(model_path="unread", device="cpu", **options)


def test_an_engine_on_two_nodes_takes_tensors_and_ends_with_either(
    fleet: RayFleet, checkpoints: tuple[Path, Path], references: tuple[Reference, Reference]
) -> None:
    with RayEngine(model_path=str(checkpoints[0]), **TWO_NODES) as engine:
        engine.update_weights_from_tensor(list(load_file(checkpoints[1] / "model.safetensors").items()))
        before = engine.check_weights()["per_engine_checksum"]
        # As a new replica takes those of a living one.
        asyncio.run(engine.ask("take_weights", engine.actor, "again"))
        assert engine.check_weights()["per_engine_checksum"] == before
        assert engine.weight_version == "again"
        whole = engine.generate(input_ids=PROMPTS[0], sampling_params=GREEDY)
        assert references[1].accepts(PROMPTS[0], whole["output_ids"])
        second = engine._nodes[1].seats[0]
        psutil.Process(second.facts.pid).kill()
        assert re.fullmatch(r"node 1, bundle \d.*has died: .*", asyncio.run(engine.async_ended()))


def test_a_node_that_leaves_in_mid_start_is_named_and_takes_the_others_along(
    fleet: RayFleet, checkpoints: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    seats: list[launch.Seat] = []
    wait_for_all = launch._wait_for_all

    def leave(starting: dict[Any, launch.NodeSeats], abandoned: threading.Event) -> None:
        seats.extend(node.seats[0] for node in starting.values())
        ray.kill(seats[1].actor)
        wait_for_all(starting, abandoned)

    monkeypatch.setattr(launch, "_wait_for_all", leave)
    with pytest.raises(EngineError, match=r"node 1, bundle \d.*has died: The actor is dead"):
        RayEngine(model_path=str(checkpoints[0]), **TWO_NODES)
    assert len(seats) == 2
    wait_until(lambda: not any(psutil.pid_exists(seat.facts.pid) for seat in seats), "no actor is left")
    wait_until(lambda: ray.available_resources().get("CPU") == 2, "nor are its bundles")


def processes_of(engine: RayEngine) -> list[psutil.Process]:
    pid = ray.get(engine.actor.facts.remote()).pid
    return psutil.Process(pid).children(recursive=True)
