"""These tests import the compatibility packages as their users do: by their folders on the path."""

import asyncio
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fixtures.servers import Server, running_server
from torch.multiprocessing import reductions

COMPAT = Path(__file__).parents[2] / "compat"
sys.path[:0] = [str(COMPAT), str(COMPAT / "vllm-names")]


@pytest.fixture(autouse=True)
def torchs_own_pickling() -> Iterator[None]:
    """What patches torch's pickling of CUDA tensors is undone: other tests pickle some too."""
    kept = reductions.reduce_tensor, reductions.rebuild_cuda_tensor
    yield
    reductions.reduce_tensor, reductions.rebuild_cuda_tensor = kept
    reductions.init_reductions()  # type: ignore[no-untyped-call]


@pytest.fixture(scope="session")
def server_of_ids(checkpoints: tuple[Path, Path]) -> Iterator[Server]:
    """One without a tokenizer, which the modules of a family share (`FAMILIES` in test/conftest.py)."""
    options = ("--skip-tokenizer-init", "--max-total-tokens", "32768", "--log-level", "warning")
    context = '{"max_position_embeddings": 1024}'
    with running_server(checkpoints[0], *options, "--json-model-override-args", context) as server:
        yield server


@pytest.fixture(scope="module")
def loop() -> Iterator[Callable[..., Any]]:
    """Runs coroutines, all of them in one event loop, as an actor does."""
    loop = asyncio.new_event_loop()
    yield loop.run_until_complete
    loop.close()
