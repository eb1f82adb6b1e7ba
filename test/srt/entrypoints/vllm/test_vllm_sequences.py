"""Updates of vLLM's clients, beside what examples/rl_step_vllm.py shows. Broadcasts go over gloo."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from fixtures.broadcasting_trainer import BroadcastingTrainer, announcement
from fixtures.published_deltas import publish, publish_as_skyrl
from fixtures.servers import Server, wait_until
from safetensors.torch import load_file, save_file

PROMPT = [5, 6, 7]
GREEDY = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}


@pytest.fixture(autouse=True)
def no_session(server: Server) -> Iterator[None]:
    """Beside what else the server is left like."""
    yield
    server.post("/abort_weight_update")
    server.post("/wake_up")


@pytest.fixture
def trainer() -> Iterator[BroadcastingTrainer]:
    with BroadcastingTrainer() as trainer:
        yield trainer
        trainer.leave()


def ok(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    return response.json()


def meet(server: Server, trainer: BroadcastingTrainer, **info: Any) -> None:
    """The rendezvous, which the client makes in a thread beside its own part of it."""
    address = trainer.join("vllm")
    del address["group_name"]
    ok(server.post("/init_weight_transfer_engine", {"init_info": {**address, **info}}))
    trainer.hear()


def update_info(folder: Path) -> dict[str, Any]:
    told = announcement(folder / "model.safetensors")
    return {"names": told["names"], "dtype_names": told["dtypes"], "shapes": told["shapes"]}


def beside(server: Server, trainer: BroadcastingTrainer, path: str, body: Any, *told: Any) -> httpx.Response:
    """The answer to the request of an update, while the trainer broadcasts."""
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.post, path, body)
        for words in told:
            trainer.tell(*words)
            trainer.hear()
        return answer.result()


def send(server: Server, trainer: BroadcastingTrainer, folder: Path, path: str, body: Any) -> Any:
    return ok(beside(server, trainer, path, body, ("send", "vllm", folder / "model.safetensors")))


def tokens(server: Server, **sampling_params: Any) -> list[int]:
    body = {"token_ids": PROMPT, "sampling_params": {**GREEDY, **sampling_params}}
    ids: list[int] = ok(server.post("/inference/v1/generate", body))["choices"][0]["token_ids"]
    return ids


def test_trl_beside_its_rollouts(server: Server, trainer: BroadcastingTrainer, checkpoints: Any) -> None:
    meet(server, trainer)
    body = {"token_ids": PROMPT, "sampling_params": {**GREEDY, "max_tokens": 600}}
    pool = ThreadPoolExecutor(1)
    rollout = pool.submit(server.post, "/inference/v1/generate", body)
    wait_until(lambda: ok(server.get("/v1/loads"))["loads"][0]["num_running_reqs"] == 1, "it runs")
    assert ok(server.post("/pause?mode=keep"))["num_retracted"] == 1
    ok(server.post("/start_weight_update", {"is_checkpoint_format": True}))
    info = update_info(checkpoints.b)
    send(server, trainer, checkpoints.b, "/update_weights", {"update_info": info})
    ok(server.client.post("/finish_weight_update", json={"weight_version": "1"}))
    ok(server.post("/resume"))
    choice = ok(rollout.result())["choices"][0]
    pool.shutdown()
    assert choice["finish_reason"] == "length"
    assert [span["version"] for span in choice["weight_versions"]] == ["default", "1"]
    assert len(choice["token_ids"]) == 600


def test_pipeline_rl(server: Server, trainer: BroadcastingTrainer, checkpoints: Any) -> None:
    ok(server.post("/shutdown_weight_transfer_engine"))
    before = tokens(server)
    info = update_info(checkpoints.b)
    rows = zip(info["names"], info["shapes"], info["dtype_names"], strict=True)
    listed = [{"name": name, "shape": shape, "dtype": f"torch.{dtype}"} for name, shape, dtype in rows]
    body = {"kind": "weight_update_request", "version": 7, "parameters_info": listed, "timestamp": 1.5}
    unmet = server.post("/receive_weight_update", body)
    assert (unmet.status_code, "call /init_weight" in unmet.json()["message"]) == (409, True)
    meet(server, trainer)
    assert send(server, trainer, checkpoints.b, "/receive_weight_update", body)["status"] == "ok"
    assert ok(server.get("/weight_info"))["weight_version"] == "7"
    assert tokens(server) != before


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ipc_handles_pickled": "gARdlC4="}, "this engine runs on the CPU"),
        ({"ipc_handles_pickled": "gARdlC4=", "tensor_sizes": [1, 2]}, "a size for each tensor"),
        ({"ipc_handles_pickled": "gARdlC4=", "shapes": []}, "lists of one length"),
        ({"ipc_handles": []}, "ipc_handles_pickled"),
    ],
)
def test_handles_that_cannot_be_opened_end_the_session(
    server: Server, given: dict[str, Any], message: str
) -> None:
    ok(server.post("/init_weight_transfer_engine", {"init_info": {"packed": True}}))
    ok(server.post("/start_weight_update"))
    info = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[2]], **given}
    refused = server.post("/update_weights", {"update_info": info})
    assert (refused.status_code, message in refused.json()["message"]) == (400, True), refused.text
    assert server.post("/finish_weight_update").status_code == 409


def test_patches_are_one_update_from_start_to_finish(
    server: Server, trainer: BroadcastingTrainer, checkpoints: Any, tmp_path: Path
) -> None:
    meet(server, trainer, packed=True)
    name = "model.layers.0.self_attn.k_proj.weight"
    weight = load_file(checkpoints.a / "model.safetensors")[name]

    def patch(folder: Path, positions: list[int], status: int) -> dict[str, Any]:
        folder.mkdir()
        save_file({"": torch.tensor(positions, dtype=torch.int32)}, folder / "positions")
        save_file({"": torch.full((2,), 9.0)}, folder / "values")
        info = {
            "names": [name],
            "dtype_names": ["float32"],
            "shapes": [list(weight.shape)],
            "num_updates_list": [2],
        }
        ok(server.post("/start_weight_update"))
        files = [("plain", "vllm", folder / file) for file in ("positions", "values")]
        answer = beside(server, trainer, "/update_weights", {"update_info": info}, *files)
        assert answer.status_code == status, answer.text
        reply: dict[str, Any] = answer.json()
        return reply

    def served() -> torch.Tensor:
        rows = server.post("/get_weights_by_name", {"name": name, "truncate_size": len(weight)})
        return torch.tensor(ok(rows))

    assert "twice" in patch(tmp_path / "bad", [7, 7], 400)["message"]
    assert server.post("/finish_weight_update").status_code == 409
    assert patch(tmp_path / "good", [7, 3], 200)["num_tensors"] == 1
    assert torch.equal(served(), weight)
    ok(server.post("/finish_weight_update", {"weight_version": "patched"}))
    weight.view(-1)[[3, 7]] = 9.0
    assert torch.equal(served(), weight)


def test_skyrl_rollouts_with_what_could_have_been_sampled(server: Server) -> None:
    params = {"top_k": 9, "min_p": 0.4, "max_tokens": 6, "ignore_eos": True, "seed": 5}
    asked = {"token_ids": PROMPT, "sampling_params": params, "return_sample_support": True}
    [choice] = ok(server.post("/skyrl/v1/generate", asked))["choices"]
    support = choice["rollout_sample_support"]
    assert list(support) == ["data", "shape", "dtype"]  # readers cut the data out by its place
    rows = np.frombuffer(base64.b64decode(support["data"]), support["dtype"]).reshape(support["shape"])
    of_vllm = {"token_ids": PROMPT, "sampling_params": params, "return_sampling_mask": True}
    [same] = ok(server.post("/inference/v1/generate", of_vllm))["choices"]
    assert {len(ids) for ids in same["sampling_mask"]} > {9}
    assert rows.tolist() == [ids + [-1] * (9 - len(ids)) for ids in same["sampling_mask"]]
    assert (choice["sampling_mask"], same["rollout_sample_support"]) == (None, None)
    for wrong in ({"sampling_params": {"top_k": -1}}, {"return_sample_support_logprobs": True}):
        refusal = server.post("/skyrl/v1/generate", {**asked, **wrong})
        assert (refusal.status_code, "return_sample_support" in refusal.json()["message"]) == (400, True)


def test_skyrl_by_deltas(server: Server, checkpoints: Any, tmp_path: Path) -> None:
    old, sync_dir = load_file(checkpoints.a / "model.safetensors"), tmp_path / "sync"
    name = "model.layers.0.self_attn.k_proj.weight"
    body = {"method": "fetch_weights", "kwargs": {"target_version": 1, "sync_dir": str(sync_dir)}}
    assert server.post("/collective_rpc", body).status_code == 409
    info = {"base_model_path": str(checkpoints.a), "local_checkpoint_dir": str(tmp_path / "local")}
    info |= {"checkpoint_load_format": "vllm_fastsafetensors"}
    ok(server.post("/init_weight_transfer_engine", {"init_info": info}))
    changed = [old]
    for version in (1, 2):
        changed.append({**changed[-1], name: changed[-1][name] + version})
        publish_as_skyrl(sync_dir, version, *changed[-2:])
    for version in (1, 2):
        asked = {"target_version": version, "sync_dir": str(sync_dir)}
        [fetched] = ok(server.post("/collective_rpc", {**body, "kwargs": asked}))["results"]
        assert fetched["status"] == "ok"
        assert ok(server.post("/fetch_weights", asked))["result"][0]["target_version"] == version
        ok(server.post("/collective_rpc", {"method": "skyrl_start_weight_update"}))
        ok(server.post("/update_weights", {"update_info": asked}))
        ok(server.post("/collective_rpc", {"method": "skyrl_finish_weight_update"}))
        assert ok(server.get("/weight_info"))["weight_version"] == str(version)
        read = ok(server.post("/get_weights_by_name", {"name": name, "truncate_size": 1000}))
        assert torch.equal(torch.tensor(read), changed[version][name])
    for asked, status in (
        ({"target_version": 1, "sync_dir": str(sync_dir)}, 400),
        ({"target_version": 3, "sync_dir": str(sync_dir)}, 400),
        ({"target_version": 3, "uri": "gs://bucket"}, 501),
    ):
        assert server.post("/fetch_weights", asked).status_code == status


def test_prime_rl_by_broadcast(
    server: Server, trainer: BroadcastingTrainer, checkpoints: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "step_13"
    folder.mkdir()
    (folder / "NCCL_READY").touch()
    refused = server.post("/update_weights", {"weight_dir": str(folder)})
    assert (refused.status_code, "/init_broadcaster" in refused.json()["message"]) == (409, True)
    # Its client leaves this in every folder: in one with weights it says nothing until a trainer was met.
    shutil.copytree(checkpoints.a, tmp_path / "step_12")
    (tmp_path / "step_12" / "NCCL_READY").touch()
    read = ok(server.post("/update_weights", {"weight_dir": str(tmp_path / "step_12")}))
    assert (read["status"], read["weight_version"]) == ("ok", "12")
    address = trainer.join("prime-rl")
    met = {"host": "127.0.0.1", "port": address["master_port"], "rank_offset": 0, "inference_world_size": 1}
    quantized = server.post("/init_broadcaster", {**met, "quantize_in_weight_transfer": True})
    assert quantized.status_code == 400
    # As prime-rl calls it, without a backend: on a CPU that is gloo.
    ok(server.post("/init_broadcaster", {**met, "timeout": 60}))
    trainer.hear()

    def update(body: Any, *words: str) -> httpx.Response:
        told = ("state_dicts", "prime-rl", checkpoints.b / "model.safetensors", *words)
        return beside(server, trainer, "/update_weights", body, told)

    before = tokens(server)
    # What does not fit is received to its end, and the next update comes by the same group.
    failed = update({"weight_dir": None}, "model.unknown.weight")
    assert (failed.status_code, "model.unknown.weight" in failed.text) == (400, True), failed.text
    assert tokens(server) == before
    updated = ok(update({"weight_dir": str(folder)}))
    assert (updated["status"], updated["committed"], updated["weight_version"]) == ("ok", True, "13")
    assert updated["num_tensors"] == len(load_file(checkpoints.b / "model.safetensors"))
    served = ok(server.post("/weight_checker", {"action": "checksum"}))["checksums"]
    ok(server.post("/update_weights_from_disk", {"model_path": str(checkpoints.b)}))
    again = {"action": "compare", "baseline": served}
    assert ok(server.post("/weight_checker", again))["match"]


def test_published_versions_are_pulled_and_committed_as_one(
    server: Server, checkpoints: Any, tmp_path: Path
) -> None:
    changed = [load_file(checkpoints.a / "model.safetensors")]
    source, local = tmp_path / "source", str(tmp_path / "local")
    name = "model.layers.0.self_attn.k_proj.weight"
    for version in (1, 2, 3):
        moved = {key: torch.where(one > 0.01 * version, one + 1, one) for key, one in changed[-1].items()}
        publish(source, version, changed[-1], moved, "overwrite")
        changed.append(moved)

    def pull(version: int) -> Any:
        asked = {"local_checkpoint_dir": local, "source_dir": str(source), "target_version": version}
        return ok(server.post("/pull_weights", asked))["num_deltas"]

    def update(version: int) -> httpx.Response:
        asked = {"model_path": local, "weight_version": str(version), "flush_cache": False}
        return server.post("/update_weights_from_disk", {**asked, "pause_mode": "in_place"})

    def serves(weights: dict[str, torch.Tensor]) -> bool:
        asked = {"name": name, "truncate_size": 1000}
        return torch.equal(torch.tensor(ok(server.post("/get_weights_by_name", asked))), weights[name])

    assert pull(0) == ok(update(0))["num_tensors"] == 0
    assert pull(2) == 2
    assert serves(changed[0])
    assert ok(update(2))["weight_version"] == "2"
    assert serves(changed[2])
    # What was pulled is of the version that served then.
    assert update(2).status_code == 409
    pull(3)
    torn = source / "weight_v000003" / "model-00000-of-00001.safetensors"
    torn.write_bytes(torn.read_bytes()[:-10])
    assert update(3).status_code == 400
    assert serves(changed[2])


def test_a_reset_makes_requests_wait_and_sums_can_be_compared(server: Server, checkpoints: Any) -> None:
    sums = ok(server.post("/weight_checker", {"action": "checksum"}))["checksums"]
    assert all(name.startswith("dp0:pp0:pcp0:tp0:") for name in sums)
    norm = load_file(checkpoints.a / "model.safetensors")["model.norm.weight"]
    assert sums["dp0:pp0:pcp0:tp0:model.norm.weight"] == sha256(norm.numpy().tobytes()).hexdigest()
    short = {"action": "checksum", "algorithm": "sum64"}
    assert {len(each) for each in ok(server.post("/weight_checker", short))["checksums"].values()} == {16}
    compare = {"action": "compare", "baseline": sums}
    assert ok(server.post("/weight_checker", compare))["match"] is True
    compare["baseline"] = {**sums, "other": "1"}
    assert ok(server.post("/weight_checker", compare))["mismatches"] == ["other"]
    assert ok(server.post("/weight_checker", {"action": "reset"}))["status"] == "reset"
    assert server.get("/ready").status_code == 503
    differs = ok(server.post("/weight_checker", {"action": "compare", "baseline": sums}))
    assert (differs["match"], differs["mismatches"]) == (False, sorted(sums))
    ok(server.post("/collective_rpc", {"method": "reload_weights"}))
    assert ok(server.post("/weight_checker", {"action": "compare", "baseline": sums}))["match"] is True
