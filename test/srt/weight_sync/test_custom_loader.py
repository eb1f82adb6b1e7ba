"""Functions of the operator's that write weights: how they are found, and what is made of their failures."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from fixtures.checkpoints import checksum_of, make_checkpoint
from transformers import AutoConfig

from ebbtide.srt.config import resolve
from ebbtide.srt.device.cpu import CpuDevice
from ebbtide.srt.errors import ConfigurationError, RequestRejected
from ebbtide.srt.managers.scheduling.weight_io import EngineWeights
from ebbtide.srt.memory_saver.arena import Arena
from ebbtide.srt.memory_saver.saver import VirtualMemorySaver
from ebbtide.srt.memory_saver.virtual_memory.host import HostVirtualMemory
from ebbtide.srt.model_executor.loader import load_weights
from ebbtide.srt.model_executor.weight_store import WeightStore
from ebbtide.srt.models.registry import build_model
from ebbtide.srt.server_args import ServerArgs
from ebbtide.srt.weight_sync.custom_loader import CustomLoader, StagedModel, import_loaders

LOADERS = "fixtures.weight_loaders"
QKV = "model.layers.0.self_attn.qkv_proj.weight"
Q = "model.layers.0.self_attn.q_proj.weight"
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("a"), "Qwen3ForCausalLM", seed=1)


@pytest.fixture
def store(path: Path) -> Iterator[WeightStore]:
    config = AutoConfig.from_pretrained(path)
    model = build_model(config.architectures[0], config, torch.float32, torch.device("cpu"))
    store = WeightStore(model, VirtualMemorySaver(HostVirtualMemory()))
    load_weights(store, path, "auto")
    yield store
    store.arena.close()


@pytest.fixture
def shadow(store: WeightStore) -> Iterator[Arena]:
    """A whole copy of the live weights."""
    with closing(store.arena.stage()) as shadow:
        list(store.complete(shadow, ()))
        yield shadow


@pytest.fixture
def model(store: WeightStore, shadow: Arena) -> StagedModel:
    return StagedModel(store, shadow)


def loader(name: str) -> CustomLoader:
    path = f"{LOADERS}.{name}"
    return import_loaders([path])[path]


# ------------------------------------------------------------------------------------------------- importing


def test_each_path_is_found_by_its_name() -> None:
    paths = [f"{LOADERS}.scale", f"{LOADERS}.copy_own"]
    found = import_loaders(paths)
    assert list(found) == [one.path for one in found.values()] == paths
    assert [one.function.__name__ for one in found.values()] == ["scale", "copy_own"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("load", "expected package.module.function, got 'load'"),
        (".load", "expected package.module.function"),
        (f"{LOADERS}.", "expected package.module.function"),
        ("no_such_package.load", "no_such_package.load cannot be imported: ModuleNotFoundError"),
        (f"{LOADERS}.no_such_function", "cannot be imported: AttributeError"),
        ("loader_that_exits.load", "cannot be imported: SystemExit: 5"),
        (f"{LOADERS}.NOT_A_FUNCTION", "is not a function: 3"),
        (f"{LOADERS}.wait", "has to be a plain function"),
    ],
)
def test_a_path_without_a_function_is_refused(
    path: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "loader_that_exits.py").write_text("raise SystemExit(5)")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigurationError, match=message):
        import_loaders([path])


def test_a_rank_does_not_start_without_one_that_is_listed(store: WeightStore, path: Path) -> None:
    args = ServerArgs(
        model_path=str(path),
        device="cpu",
        max_total_tokens=256,
        skip_tokenizer_init=True,
        custom_weight_loader=[f"{LOADERS}.scale", "no_such_package.load"],
    )
    with pytest.raises(ConfigurationError, match=r"no_such_package\.load cannot be imported"):
        EngineWeights(store, resolve(args), CpuDevice())


# --------------------------------------------------------------------------------------------------- writing


def test_what_is_written_serves_after_the_commit_and_not_before(
    store: WeightStore, shadow: Arena, model: StagedModel
) -> None:
    before = store.read(Q, 10**6)
    named_tensors = [("model.layers.0.self_attn.qkv", torch.tensor(2.0))]
    loader("scale").load(model, named_tensors)
    assert torch.equal(store.read(Q, 10**6), before)
    store.commit(shadow)
    assert torch.equal(store.read(Q, 10**6), 2 * before)


def test_parameters_are_the_engines_own_and_can_be_copied_to(
    store: WeightStore, shadow: Arena, model: StagedModel
) -> None:
    names = [name for name, _ in model.named_parameters()]
    assert QKV in names
    assert Q not in names
    loader("copy_own").load(model, [(QKV, torch.full((128, 64), 3.0))])
    store.commit(shadow)
    assert (store.read(Q, 10**6) == 3).all()


def test_checkpoint_names_are_loaded_whole(store: WeightStore, shadow: Arena, model: StagedModel) -> None:
    value = torch.randn(64, 64)
    loader("strip_prefix").load(model, [(f"policy.{Q}", value), (f"policy.{NORM}", torch.ones(64))])
    store.commit(shadow)
    assert torch.equal(store.read(Q, 10**6), value)
    assert (store.read(NORM, 10**6) == 1).all()


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [(QKV, (128, 64), "no parameter of this name"), (Q, (64, 63), r"expected shape \[64, 64\]")],
)
def test_loading_what_does_not_fit_is_an_error_of_the_function(
    model: StagedModel, name: str, shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(RequestRejected, match=rf"weights are unchanged: ValueError: {name}: .*{message}"):
        loader("strip_prefix").load(model, [(f"policy.{name}", torch.zeros(shape))])


def test_buffers_are_copies(store: WeightStore, model: StagedModel) -> None:
    before = dict(model.named_buffers())
    assert any("inv_freq" in name for name in before)
    loader("change_buffers").load(model, [])
    after = dict(store.buffers())
    assert all(torch.equal(after[name], before[name]) for name in before)


# -------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fail_where_told", "unchanged: ValueError: only half of it was done"),
        ("exit_at_once", "unchanged: SystemExit: 3"),
        ("replace_data", r"unchanged: ValueError: model\.embed_tokens\.weight: its data was replaced"),
    ],
)
def test_a_failure_is_a_refusal_that_leaves_the_live_weights(
    store: WeightStore, model: StagedModel, name: str, message: str
) -> None:
    before = checksum_of(store)
    with pytest.raises(RequestRejected, match=rf"custom weight loader {LOADERS}\.{name} failed, .*{message}"):
        loader(name).load(model, [("any", torch.ones(1))])
    assert checksum_of(store) == before


def test_a_failure_holds_on_to_none_of_the_senders_tensors(model: StagedModel) -> None:
    named_tensors = [("any", torch.ones(1))]
    gone = weakref.ref(named_tensors[0][1])
    gc.disable()
    try:
        with pytest.raises(RequestRejected):
            loader("fail_where_told").load(model, named_tensors)
        assert gone() is None
    finally:
        gc.enable()


def test_a_long_reason_is_cut(model: StagedModel) -> None:
    def complain(model: StagedModel, named_tensors: object) -> None:
        raise ValueError("x" * 10**6)

    with pytest.raises(RequestRejected) as refused:
        CustomLoader("a.b", complain).load(model, [])
    assert len(refused.value.message) < 2000
