"""What trainers send to, an engine and a server of one checkpoint; and the weights of a trainer."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.checkpoints import make_checkpoint
from fixtures.servers import Server, running_server
from safetensors.torch import load_file

from ebbtide import Engine

Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("sender") / "old", "Qwen3ForCausalLM", seed=1)


@pytest.fixture(scope="session")
def old(checkpoint: Path) -> Weights:
    return load_file(checkpoint / "model.safetensors")


@pytest.fixture(scope="session")
def new(old: Weights) -> Weights:
    generator = torch.Generator().manual_seed(2)
    return {name: torch.rand(tensor.shape, generator=generator) for name, tensor in old.items()}


@pytest.fixture(scope="session")
def shared_engine(checkpoint: Path) -> Iterator[Any]:
    with Engine(
        model_path=str(checkpoint), device="cpu", max_total_tokens=4096, skip_tokenizer_init=True
    ) as engine:
        yield engine


def with_old_weights(engine: Any, checkpoint: Path) -> Any:
    """Whatever the test before left."""
    engine.abort_weight_update()
    engine.update_weights_from_disk(str(checkpoint), weight_version="old")
    return engine


@pytest.fixture
def engine(shared_engine: Any, checkpoint: Path) -> Any:
    return with_old_weights(shared_engine, checkpoint)


@pytest.fixture(scope="session")
def shared_divided_engine(checkpoint: Path) -> Iterator[Any]:
    """Of two ranks, in the environment of a trainer that torchrun has started."""
    arguments: dict[str, Any] = {"device": "cpu", "max_total_tokens": 4096, "skip_tokenizer_init": True}
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        environment.setenv("TORCHELASTIC_RESTART_COUNT", "0")
        engine = Engine(model_path=str(checkpoint), tp_size=2, **arguments)
    with engine:
        yield engine


@pytest.fixture
def divided_engine(shared_divided_engine: Any, checkpoint: Path) -> Any:
    return with_old_weights(shared_divided_engine, checkpoint)


@pytest.fixture(scope="session")
def shared_server(checkpoint: Path) -> Iterator[Server]:
    with running_server(checkpoint, "--device", "cpu", "--skip-tokenizer-init") as server:
        yield server


@pytest.fixture
def server(shared_server: Server, checkpoint: Path) -> Server:
    """With the old weights, whatever the test before left."""
    shared_server.post("/abort_weight_update").raise_for_status()
    body = {"model_path": str(checkpoint), "weight_version": "old"}
    shared_server.post("/update_weights_from_disk", body).raise_for_status()
    return shared_server
