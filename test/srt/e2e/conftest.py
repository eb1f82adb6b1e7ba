"""Real processes and a tiny model: checkpoints A and B of one shape, their references."""

from pathlib import Path

import pytest
from fixtures.checkpoints import make_checkpoint
from fixtures.gpu_device import DEVICE
from fixtures.references import Reference


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
