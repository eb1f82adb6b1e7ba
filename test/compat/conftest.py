"""These tests import the compatibility packages as their users do: by their folders on the path."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
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
