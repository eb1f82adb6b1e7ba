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

from ebbtide.srt.errors import ConfigurationError, RequestRejected
from ebbtide.srt.memory_saver.arena import Arena
from ebbtide.srt.memory_saver.saver import VirtualMemorySaver
from ebbtide.srt.memory_saver.virtual_memory.host import HostVirtualMemory
from ebbtide.srt.model_executor.loader import load_weights
from ebbtide.srt.model_executor.weight_store import WeightStore
from ebbtide.srt.models.registry import build_model
from ebbtide.srt.slices import finish
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
    with closing(finish(store.arena.stage())) as shadow:
        list(store.complete(shadow, ()))
        yield shadow


@pytest.fixture
def model(store: WeightStore, shadow: Arena) -> StagedModel:
    return StagedModel(store, shadow)


def loader(name: str) -> CustomLoader:
    path = f"{LOADERS}.{name}"
    return import_loaders([path])[path]


# ------------------------------------------------------------------------------------------------- importing


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("load", "expected package.module.function, got 'load'"),
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


# --------------------------------------------------------------------------------------------------- writing


def test_parameters_are_the_engines_own_and_can_be_copied_to(
    store: WeightStore, shadow: Arena, model: StagedModel
) -> None:
    names = [name for name, _ in model.named_parameters()]
    assert QKV in names
    assert Q not in names
    before = checksum_of(store)
    loader("copy_own").load(model, [(QKV, torch.full((128, 64), 3.0))])
    assert checksum_of(store) == before, "it serves after the commit and not before"
    store.commit(shadow)
    assert (store.read(Q, 10**6)() == 3).all()


def test_checkpoint_names_are_loaded_whole(store: WeightStore, shadow: Arena, model: StagedModel) -> None:
    value = torch.randn(64, 64)
    loader("strip_prefix").load(model, [(f"policy.{Q}", value), (f"policy.{NORM}", torch.ones(64))])
    store.commit(shadow)
    assert torch.equal(store.read(Q, 10**6)(), value)
    assert (store.read(NORM, 10**6)() == 1).all()


def test_loading_what_does_not_fit_is_an_error_of_the_function(model: StagedModel) -> None:
    message = rf"weights are unchanged: ValueError: {Q}: .*expected shape \[64, 64\]"
    with pytest.raises(RequestRejected, match=message):
        loader("strip_prefix").load(model, [(f"policy.{Q}", torch.zeros(64, 63))])


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
