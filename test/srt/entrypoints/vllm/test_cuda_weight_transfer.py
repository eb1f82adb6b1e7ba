"""Weights as vLLM's trainers send them on GPUs: raw NCCL and CUDA IPC handles, over HTTP only.

The sender is `fixtures.gpu_vllm_trainer`, a process of its own that knows nothing of this engine. Parameters
are held against those of the same checkpoint read from its folder, by their checksums.
"""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from fixtures.checkpoints import make_checkpoint
from fixtures.gpu_vllm_trainer import VllmTrainer, info_of
from fixtures.servers import Server, free_port, running_server
from safetensors.torch import load_file

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")

SHAPE = {"head_dim": 128, "vocab_size": 1000, "dtype": "bfloat16"}
# Several tensors each, and those at odd offsets.
PACKED_BYTES = 100_000
GREEDY = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}
UPDATE_TIMEOUT_S = 8.0
FLAGS = ("--device", "cuda", "--skip-tokenizer-init", "--cuda-graph-max-bs", "2")

Checksums = dict[str, str]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {
        name: make_checkpoint(folder / name, "Qwen3ForCausalLM", seed=ord(name), **SHAPE) for name in "ab"
    }


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=[two_gpus, pytest.mark.multi_gpu])])
def server(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Iterator[Server]:
    limit = ("--weight-update-timeout-s", str(UPDATE_TIMEOUT_S))
    with running_server(folders["a"], *FLAGS, *limit, "--tp-size", str(request.param)) as server:
        yield server


@pytest.fixture(scope="module")
def sums(server: Server, folders: dict[str, Path]) -> dict[str, Checksums]:
    """The parameters' of each checkpoint."""
    found = {}
    for name in "ba":
        reload(server, folders[name])
        found[name] = checksums(server)
    assert found["a"] != found["b"]
    return found


@pytest.fixture(autouse=True)
def old_weights(server: Server, folders: dict[str, Path]) -> None:
    server.post("/abort_weight_update")
    reload(server, folders["a"])


@pytest.fixture
def trainer() -> Iterator[VllmTrainer]:
    """On the GPU behind those of the engine, or on the first."""
    with VllmTrainer(torch.cuda.device_count() - 1) as trainer:
        yield trainer


def ok(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    return response.json()


def reload(server: Server, folder: Path) -> None:
    ok(server.post("/update_weights_from_disk", {"model_path": str(folder)}))


def checksums(server: Server) -> Checksums:
    found: Checksums = ok(server.post("/weight_checker", {"action": "checksum"}))["checksums"]
    return found


def is_served(server: Server, expected: Checksums) -> bool:
    """Whether these are the parameters, and requests are answered by them."""
    body = {"token_ids": [5, 6, 7], "sampling_params": GREEDY}
    [choice] = ok(server.post("/inference/v1/generate", body))["choices"]
    assert len(choice["token_ids"]) == 16
    return bool(ok(server.post("/weight_checker", {"action": "compare", "baseline": expected}))["match"])


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def meet(server: Server, trainer: VllmTrainer, **init_info: Any) -> None:
    port, size = free_port(), num_ranks(server) + 1
    trainer.tell("join", port, size)
    place = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": size}
    ok(server.post("/init_weight_transfer_engine", {"init_info": {**place, **init_info}}))
    trainer.hear()


def update(server: Server, info: dict[str, Any], send: Callable[[], object]) -> httpx.Response:
    """The request in a thread, and the broadcasts meanwhile."""
    answers: list[httpx.Response] = []
    asking = threading.Thread(
        target=lambda: answers.append(server.post("/update_weights", {"update_info": info}))
    )
    asking.start()
    send()
    asking.join()
    return answers[0]


def num_ranks(server: Server) -> int:
    return int(ok(server.get("/get_world_size"))["world_size"])


def need_a_gpu_behind(server: Server) -> None:
    if torch.cuda.device_count() <= num_ranks(server):
        pytest.skip("the trainer needs a GPU of its own")


@two_gpus
@pytest.mark.multi_gpu
@pytest.mark.parametrize("is_packed", [False, True], ids=["per tensor", "packed"])
def test_broadcasts_without_a_group_of_torchs(
    server: Server,
    trainer: VllmTrainer,
    folders: dict[str, Path],
    sums: dict[str, Checksums],
    is_packed: bool,
) -> None:
    need_a_gpu_behind(server)
    # 0.28 says it at the beginning, 0.22 with each update.
    form = {"packed": is_packed, "packed_buffer_size_bytes": PACKED_BYTES}
    meet(server, trainer, **form)
    for name, given in (("b", {}), ("a", form)):
        file = folders[name] / "model.safetensors"
        words = ("packed", file, PACKED_BYTES) if is_packed else ("send", file)
        ok(server.post("/start_weight_update"))
        info = info_of(weights_of(folders[name]))
        reply = ok(update(server, {**info, **given}, lambda words=words: trainer.tell(*words)))
        trainer.hear()
        assert reply["num_tensors"] == len(info["names"])
        assert is_served(server, sums["a" if name == "b" else "b"]), "nothing serves before the finish"
        ok(server.post("/finish_weight_update"))
        assert is_served(server, sums[name])


@two_gpus
@pytest.mark.multi_gpu
def test_a_trainer_that_leaves_in_mid_broadcast(
    server: Server,
    folders: dict[str, Path],
    sums: dict[str, Checksums],
    tmp_path: Path,
) -> None:
    need_a_gpu_behind(server)
    file = folders["b"] / "model.safetensors"
    info = info_of(weights_of(folders["b"]))
    with VllmTrainer(num_ranks(server)) as leaving:
        meet(server, leaving)
        ok(server.post("/start_weight_update"))

        def send_half() -> None:
            leaving.tell("half", file)
            leaving.hear()
            leaving.kill()

        answer = update(server, info, send_half)
    assert answer.status_code == 400, answer.text
    assert is_served(server, sums["a"])
    assert server.post("/finish_weight_update").status_code == 409
    ok(server.post("/start_weight_update"))
    assert server.post("/update_weights", {"update_info": info}).status_code == 409
    server.post("/abort_weight_update")

    with VllmTrainer(num_ranks(server)) as trainer:
        meet_by_id(server, trainer, tmp_path / "id")
        ok(server.post("/start_weight_update"))
        ok(update(server, info, lambda: trainer.tell("send", file)))
        ok(server.post("/finish_weight_update"))
        assert is_served(server, sums["b"])


def meet_by_id(server: Server, trainer: VllmTrainer, told: Path) -> None:
    size = num_ranks(server) + 1
    trainer.tell("join_by_id", told, size)
    while not (told.exists() and told.read_text()):
        threading.Event().wait(0.01)
    info = {"nccl_unique_id_b64": told.read_text(), "rank_offset": 1, "world_size": size}
    ok(server.post("/init_weight_transfer_engine", {"init_info": info}))
    trainer.hear()


@pytest.mark.parametrize("buffer_bytes", [0, 600_000], ids=["per tensor", "packed"])
def test_handles_of_the_trainers_memory(
    server: Server,
    trainer: VllmTrainer,
    folders: dict[str, Path],
    sums: dict[str, Checksums],
    tmp_path: Path,
    buffer_bytes: int,
) -> None:
    ok(server.post("/init_weight_transfer_engine", {"init_info": {"packed": buffer_bytes > 0}}))
    num_tensors = 0
    for name in "ba":
        file = folders[name] / "model.safetensors"
        ok(server.post("/start_weight_update"))
        for info in trainer.lend(
            file, tmp_path / "told", *range(num_ranks(server)), buffer_bytes=buffer_bytes
        ):
            reply = ok(server.post("/update_weights", {"update_info": info}))
            assert (reply["num_tensors"], reply["committed"]) == (len(info["names"]), False)
            num_tensors += len(info["names"])
        ok(server.post("/finish_weight_update"))
        assert is_served(server, sums[name])
    assert num_tensors == 2 * len(weights_of(folders["a"]))
