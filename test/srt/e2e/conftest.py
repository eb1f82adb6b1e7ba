"""Real processes and a tiny model: checkpoints A and B of one shape, their references, and engines of A."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fixtures.checkpoints import make_checkpoint
from fixtures.gpu_device import DEVICE, ON_CPU_AND_GPU
from fixtures.references import Reference

from ebbtide import Engine


@pytest.fixture(scope="session")
def checkpoint_a(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("a"), "Qwen3ForCausalLM", seed=1, **DEVICE.checkpoint)


@pytest.fixture(scope="session")
def checkpoint_b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("b"), "Qwen3ForCausalLM", seed=2, **DEVICE.checkpoint)


@pytest.fixture(scope="session")
def reference_a(checkpoint_a: Path) -> Reference:
    return Reference(checkpoint_a)


@pytest.fixture(scope="session")
def reference_b(checkpoint_b: Path) -> Reference:
    return Reference(checkpoint_b)


@contextmanager
def _serving(checkpoint: Path, arguments: dict[str, Any]) -> Iterator[Engine]:
    fixed: dict[str, Any] = {"random_seed": 7, "max_total_tokens": 8192}
    with Engine(model_path=str(checkpoint), **fixed, **arguments) as engine:
        yield engine


@pytest.fixture(scope="session")
def shared_engine(checkpoint_a: Path) -> Iterator[Engine]:
    """One of one rank, for the modules of a family (`FAMILIES` in test/conftest.py)."""
    with _serving(checkpoint_a, DEVICE.server_args) as engine:
        yield engine


@pytest.fixture
def engine_a(shared_engine: Engine, checkpoint_a: Path) -> Engine:
    """The shared engine with the weights of A, whatever the test before left."""
    shared_engine.update_weights_from_disk(str(checkpoint_a), weight_version="a")
    return shared_engine


@pytest.fixture(scope="session", params=ON_CPU_AND_GPU)
def sampling_engine(request: pytest.FixtureRequest, checkpoint_a: Path) -> Iterator[Engine]:
    """One whose answers are exact; in the gate, the shared one with the weights of A."""
    if not (request.param or DEVICE.is_cuda):
        shared = request.getfixturevalue("shared_engine")
        shared.update_weights_from_disk(str(checkpoint_a), weight_version="a")
        yield shared
    else:
        with _serving(checkpoint_a, request.param) as engine:
            yield engine
