"""What holds for every test: no network, one thread per process. Helpers: `from fixtures.x import y`."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "srt"))

# Before anything imports torch or transformers, and inherited by the engines' processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models lose more to thread hand-offs than they gain
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
if not Path("/dev/nvidiactl").exists():
    # Triton reads it when it is imported, which transformers does: without a GPU its kernels are interpreted.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The contract's sequences and the frameworks' recorded calls, through an engine as it is served.
CONTRACT = {"test_contract_sequences", "test_wire_traces"}
# Who takes one of these starts processes. All other modules are of the tier "unit".
STARTERS = {
    "subprocess",
    "multiprocessing",
    "ebbtide.ray.engine",
    "ebbtide.ray.fleet",
    "ebbtide.demo.run",
    "ebbtide.testing.null_engine",
}
STARTERS |= {f"ebbtide.srt.entrypoints.{name}" for name in ("early_processes", "engine", "launcher")}
STARTERS |= {f"fixtures.{name}" for name in ("broadcasting_trainer", "compat", "rank_processes")}
STARTERS |= {"fixtures.servers", "fixtures.trainer_process"}


def tier_of(module: object) -> str:
    """contract, processes or unit: the cheapest kind of place where a test of this module can run."""
    names = vars(module)
    if names["__name__"].rpartition(".")[2] in CONTRACT:
        return "contract"
    origins = {
        getattr(value, "__module__", None) or getattr(value, "__name__", "") for value in names.values()
    }
    return "processes" if origins & STARTERS else "unit"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with its tier. What takes long comes first, so that short files fill the end."""
    tiers = [tier_of(item.getparent(pytest.Module).obj) for item in items]  # type: ignore[union-attr]
    for item, tier in zip(items, tiers, strict=True):
        item.add_marker(tier)
    order = sorted(
        range(len(items)), key=lambda index: (tiers[index] == "unit", "fuzz" not in items[index].nodeid)
    )
    items[:] = [items[index] for index in order]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two of one shape with different weights: what is served first, and what updates bring."""
    from fixtures.checkpoints import make_checkpoint

    folder = tmp_path_factory.mktemp("checkpoints")
    first, second = (make_checkpoint(folder / name, "Qwen3ForCausalLM", seed=ord(name)) for name in "ab")
    return first, second
