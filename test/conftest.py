"""What holds for every test: no network, one thread per process. Helpers: `from fixtures.x import y`."""

import atexit
import contextlib
import dataclasses
import gc
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

# What is imported and collected stays until the end: to look through it for garbage takes seconds each time.
gc.disable()

sys.path.insert(0, str(Path(__file__).parent / "srt"))

# Before anything imports torch or transformers, and inherited by the engines' processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models lose more to thread hand-offs than they gain
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
# What Ray starts would have its turn after all else (nice 15): a start then takes minutes beside other tests.
os.environ.setdefault("RAY_worker_niceness", "0")
# It would start as many idle processes as there are CPUs, for tasks that no test submits.
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
os.environ.setdefault("RAY_enable_metrics_collection", "0")
if not Path("/dev/nvidiactl").exists():
    # Triton reads it when it is imported, which transformers does: without a GPU its kernels are interpreted.
    os.environ.setdefault("TRITON_INTERPRET", "1")

with contextlib.suppress(ImportError):  # a machine that runs the GPU tests alone may lack it
    from hypothesis import settings

    # An example that takes long on a loaded machine is no failure.
    settings.register_profile("patient", settings(), deadline=None)
    settings.load_profile("patient")

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
STARTERS |= {f"ebbtide.srt.entrypoints.{name}" for name in ("engine", "launch.launcher")}
STARTERS |= {"ebbtide.srt.entrypoints.launch.child_process"}
STARTERS |= {f"fixtures.{name}" for name in ("broadcasting_trainer", "compat", "forking", "rank_processes")}
STARTERS |= {"fixtures.servers", "fixtures.trainer_process"}

# Modules that share an engine, or the process that ranks are forked from: one worker starts it for them all.
SERVED = (
    "test_continue_from",
    "test_http_server",
    "test_loads",
    "openai/test_routes",
    "vllm/test_vllm_sequences",
)
FORKING = ("test_distributed_source", "test_receive_plan")
OF_ONE_RANK = ("test_canary_logprobs", "test_idle", "test_sampling_mask", "test_structured_output")
# Modules of a minute or more, and no family.
LONG = (
    "test_contract_sequences",
    "test_fleet",
    "test_framework_steps",
    "test_memory_returned",
    "test_openapi",
)
FAMILIES = (
    ("test/trainer/",),
    ("test/srt/distributed/", *(f"test/srt/weight_sync/{name}.py" for name in FORKING)),
    tuple(f"test/srt/entrypoints/{name}.py" for name in SERVED),
    tuple(f"test/srt/e2e/{name}.py" for name in OF_ONE_RANK),
    tuple(f"test/compat/{name}.py" for name in ("test_published_versions", "test_sequences")),
)


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
    """Mark each test with its tier. What starts processes comes first, and of that what takes long."""
    tiers = [tier_of(item.getparent(pytest.Module).obj) for item in items]  # type: ignore[union-attr]
    for item, tier in zip(items, tiers, strict=True):
        item.add_marker(tier)
    whole = tuple(module for family in FAMILIES for module in family)

    def turn(index: int) -> tuple[bool, bool, bool]:
        nodeid, tier = items[index].nodeid, tiers[index]
        is_long = nodeid.startswith(whole) or Path(nodeid.partition("::")[0]).stem in LONG
        return tier == "unit", not is_long, "fuzz" not in nodeid

    order = sorted(range(len(items)), key=turn)
    items[:] = [items[index] for index in order]


def scope_of(nodeid: str) -> str:
    """The name of the tests that one worker runs one after the other: a module's, or a family's."""
    file = nodeid.partition("::")[0]
    return next((family[0] for family in FAMILIES if file.startswith(family)), file)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, default=0, help="how many modules run at a time, each in a fork")


def pytest_configure(config: pytest.Config) -> None:
    from fixtures.workers import Workers

    if number := config.getoption("workers"):
        config.pluginmanager.register(Workers(number, scope_of))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """On GPUs, whose driver forks do not have, xdist starts the workers: by the same scopes."""
    from xdist.scheduler import LoadFileScheduling

    class LoadFamilyScheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

    return LoadFamilyScheduling(config, log)


def pytest_collection_finish() -> None:
    """Collections of garbage leave out what is there by now."""
    gc.freeze()
    atexit.register(gc.unfreeze)
    gc.enable()
    _quicken_interpreter()


def _quicken_interpreter() -> None:
    """Where kernels are interpreted, have Triton replace its language once for each launch.

    Its interpreter looks through the language again at every call of a function of a kernel by another, which
    took half of the time of these tests. It also computes whether sums of integers overflow, which took a
    third of the rest, and tells nobody but in its debug mode.
    """
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if not hasattr(interpreter, "_patch_lang"):
        return
    replace, language = interpreter._patch_lang, interpreter.tl
    # A launch replaces the modules that its function names, and Triton's own functions name the other one.
    everything = SimpleNamespace(__globals__={"tl": language, "core": language.core})

    def replace_once(function: object) -> Any:
        is_replaced = not language.core.is_builtin(language.load)
        return interpreter._LangPatchScope() if is_replaced else replace(everything)

    interpreter._patch_lang = replace_once
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two of one shape with different weights: what is served first, and what updates bring."""
    from fixtures.checkpoints import make_pair

    return make_pair(tmp_path_factory.mktemp("checkpoints"))
