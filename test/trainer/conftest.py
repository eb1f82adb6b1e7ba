"""The checkpoint that engines start with, and the weights of a trainer that has gone on from it."""

from pathlib import Path

import pytest
import torch
from fixtures.checkpoints import make_checkpoint
from safetensors.torch import load_file

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
