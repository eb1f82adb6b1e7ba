"""A trainer's tensors on the engine's GPU: read where they are, in this process's engine and over HTTP."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.checkpoints import make_checkpoint
from fixtures.servers import Server, running_server
from safetensors.torch import load_file

from ebbtide import Engine
from ebbtide.trainer import WeightSender

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

ALL_ROWS = 10**6
BUCKET_BYTES = 32 << 10


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("cuda-sender") / "model", "Qwen3ForCausalLM")


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Server]:
    flags = ("--device", "cuda", "--attention-backend", "torch_native", "--skip-tokenizer-init")
    with running_server(checkpoint, *flags) as server:
        yield server


@pytest.fixture
def new(checkpoint: Path) -> dict[str, torch.Tensor]:
    tensors = load_file(checkpoint / "model.safetensors", device="cuda")
    return {name: torch.rand_like(tensor) for name, tensor in tensors.items()}


@pytest.fixture
def no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "ebbtide.trainer.payload_encoding.serialize_tensors", lambda _: pytest.fail("the tensors were copied")
    )


def held_by(server: Server, name: str) -> torch.Tensor:
    return torch.tensor(server.post("/get_weights_by_name", {"name": name, "truncate_size": ALL_ROWS}).json())


@pytest.mark.usefixtures("no_copies")
def test_a_server_reads_what_is_gathered_and_lets_go_of_it(
    server: Server, new: dict[str, torch.Tensor]
) -> None:
    gc.collect()
    allocated = torch.cuda.memory_allocated()
    sender = WeightSender(str(server.client.base_url), bucket_bytes=BUCKET_BYTES, retries=0)
    for step in range(20):
        sent = sender.send(((name, tensor * (step + 1)) for name, tensor in new.items()), version=step)
        assert sent.staged is True
        assert sent.num_tensors == len(new)
    for name, tensor in new.items():
        assert torch.equal(held_by(server, name), (tensor * 20).cpu()), name
    gc.collect()
    torch.cuda.ipc_collect()
    assert torch.cuda.memory_allocated() == allocated


@pytest.mark.usefixtures("no_copies")
@pytest.mark.parametrize("tp_size", [1, pytest.param(2, marks=pytest.mark.multi_gpu)])
def test_an_engine_of_this_process_reads_them_too(
    checkpoint: Path, new: dict[str, torch.Tensor], tp_size: int
) -> None:
    """Its second rank from another GPU."""
    if tp_size > 1 and not (torch.cuda.device_count() > 1 and torch.cuda.can_device_access_peer(1, 0)):
        pytest.skip("needs two GPUs that read each other's memory")
    arguments: dict[str, Any] = {"device": "cuda", "attention_backend": "torch_native", "tp_size": tp_size}
    with Engine(
        model_path=str(checkpoint), max_total_tokens=4096, skip_tokenizer_init=True, **arguments
    ) as engine:
        for keep_mapped in (False, True):
            sender = WeightSender(engine, bucket_bytes=BUCKET_BYTES, retries=0, keep_mapped=keep_mapped)
            for step in range(1 + 2 * keep_mapped):
                for tensor in new.values():
                    tensor += 1
                sender.send(new.items(), version=f"{keep_mapped} {step}")
                assert engine.weight_version == f"{keep_mapped} {step}"
                for name, tensor in new.items():
                    held = torch.tensor(engine.get_weights_by_name(name, ALL_ROWS))
                    assert torch.equal(held, tensor.cpu()), name
            sender.close()
        # All at once is written in place, with and without what was worked out the last time.
        for _ in range(3):
            for tensor in new.values():
                tensor += 1
            engine.update_weights_from_tensor(list(new.items()), keep_mapped=True)
            for name, tensor in new.items():
                held = torch.tensor(engine.get_weights_by_name(name, ALL_ROWS))
                assert torch.equal(held, tensor.cpu()), name
