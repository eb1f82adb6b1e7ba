"""Checkpoints and one server for all tests of the endpoints: each start costs seconds."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from fixtures.checkpoints import make_checkpoint
from fixtures.servers import Server, running_server


@dataclass(frozen=True)
class Checkpoints:
    """Two checkpoints of one architecture with different weights."""

    a: Path
    b: Path


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    folder = tmp_path_factory.mktemp("checkpoints")
    # Room for streams that do not end before a test has done something to them.
    shape = {"max_position_embeddings": 2048}
    return Checkpoints(
        make_checkpoint(folder / "a", "Qwen3ForCausalLM", seed=1, **shape),
        make_checkpoint(folder / "b", "Qwen3ForCausalLM", seed=2, **shape),
    )


@pytest.fixture(scope="session")
def anthropic() -> Any:
    """Anthropic's package. It takes two seconds, which workers that run no test of it do without."""
    return import_module("anthropic")


@pytest.fixture(scope="session")
def shared_server(checkpoints: Checkpoints) -> Iterator[Server]:
    flags = ["--max-queued-requests", "8", "--served-model-name", "org/tide"]
    with running_server(checkpoints.a, *flags) as server:
        yield server


@pytest.fixture
def server(shared_server: Server, checkpoints: Checkpoints) -> Iterator[Server]:
    """The shared server, left as it was found: idle, running, resident, with the weights of checkpoint a."""
    yield shared_server
    assert shared_server.post("/abort_request", {"abort_all": True, "report": True}).is_success
    assert shared_server.post("/resume_memory_occupation").is_success
    assert shared_server.post("/continue_generation").is_success
    update = {"model_path": str(checkpoints.a), "weight_version": "default"}
    assert shared_server.post("/update_weights_from_disk", update).is_success
