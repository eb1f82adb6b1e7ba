"""Engines and a fleet of them as actors of a local cluster, with replicas that die."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from fixtures.references import Reference
from fixtures.servers import wait_until
from safetensors.torch import load_file

from ebbtide.ray import RayEngine, RayFleet
from ebbtide.srt.errors import RequestRejected

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 48, "ignore_eos": True}
PROMPTS = [[3, 1, 4, 1, 5], list(range(40)), [200], [7] * 20]
OPTIONS: dict[str, Any] = {"device": "cpu", "max_total_tokens": 4096, "skip_tokenizer_init": True}


@pytest.fixture(scope="module")
def fleet(cluster: None, checkpoints: tuple[Path, Path]) -> Iterator[RayFleet]:
    with RayFleet(2, model_path=str(checkpoints[0]), **OPTIONS) as fleet:
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
    fleet: RayFleet, checkpoints: tuple[Path, Path], references: tuple[Reference, Reference]
) -> None:
    """One dies in mid-rollout after an update: its weights are on no disk it could be started from."""
    weights = load_file(checkpoints[1] / "model.safetensors")
    assert fleet.update_weights_from_tensor(weights.items(), weight_version="1")["weight_version"] == "1"
    pids = [process.pid for process in processes_of(fleet.engines[1])]
    prompts, params = PROMPTS * 4, {**GREEDY, "max_new_tokens": 200}
    answers: list[Any] = []
    rollout = threading.Thread(
        target=lambda: answers.extend(fleet.generate(input_ids=prompts, sampling_params=params))
    )
    rollout.start()
    stream = fleet.generate(input_ids=[9, 9], sampling_params=params, stream=True)
    next(stream)
    wait_until(lambda: fleet.status()[1]["num_live"] > 0, "it has work")
    time.sleep(0.3)
    ray.kill(fleet.engines[1].actor)
    *_, last = stream
    rollout.join()
    assert [len(one["output_ids"]) for one in [*answers, last]] == [200] * 17
    assert all(
        map(references[1].accepts, [*prompts, [9, 9]], [one["output_ids"] for one in [*answers, last]])
    )
    metas = [one["meta_info"] for one in answers]
    assert all(meta["weight_versions"] == [{"version": "1", "start": 0, "end": 200}] for meta in metas)
    assert any(meta["num_moves"] for meta in metas)
    assert all(meta["finish_reason"] == {"type": "length", "length": 200} for meta in metas)
    wait_until(lambda: not any(map(psutil.pid_exists, pids)), "its processes have gone")

    fleet.wait_for_all(60)
    assert [one["num_deaths"] for one in fleet.status()] == [0, 1]
    assert len(checksums(fleet)) == 1
    assert fleet.weight_version == "1"
    done = fleet.update_weights_from_disk(str(checkpoints[0]), weight_version="2")
    assert [reply["weight_version"] for reply in done["replicas"].values()] == ["2", "2"]
    assert len(checksums(fleet)) == 1


def processes_of(engine: RayEngine) -> list[psutil.Process]:
    pid = ray.get(engine.actor.facts.remote()).pid
    return psutil.Process(pid).children(recursive=True)
