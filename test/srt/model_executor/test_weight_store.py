"""Named tensors over the weights arena: the fuse map, checks, staging, commit and rollback."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fixtures.checkpoints import ARCHITECTURES, checksum_of, make_checkpoint
from fixtures.model_runs import RunnerDriver
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, Qwen3_5TextConfig

from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.memory_saver.saver import VirtualMemorySaver
from ebbtide.srt.memory_saver.virtual_memory.host import HostVirtualMemory
from ebbtide.srt.model_executor import weight_store
from ebbtide.srt.model_executor.loader import load_weights
from ebbtide.srt.model_executor.weight_copies import WeightCopies
from ebbtide.srt.model_executor.weight_store import WeightStore
from ebbtide.srt.models.base import CausalLM
from ebbtide.srt.models.quantizing import Quantization
from ebbtide.srt.models.registry import build_model
from ebbtide.srt.slices import finish

EMBED, NORM = "model.embed_tokens.weight", "model.norm.weight"
Q, K = "model.layers.1.self_attn.q_proj.weight", "model.layers.1.self_attn.k_proj.weight"
QKV = "model.layers.1.self_attn.qkv_proj.weight"


def open_store(path: Path, dtype: torch.dtype = torch.float32) -> tuple[WeightStore, CausalLM]:
    config = AutoConfig.from_pretrained(path)
    model = build_model(config.architectures[0], config, dtype, torch.device("cpu"))
    store = WeightStore(model, VirtualMemorySaver(HostVirtualMemory()))
    load_weights(store, path, "auto")
    return store, model


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("a"), "Qwen3ForCausalLM", seed=1)


@pytest.fixture
def store(path: Path) -> Iterator[WeightStore]:
    opened, _ = open_store(path)
    yield opened
    opened.arena.close()


def snapshot(store: WeightStore) -> dict[str, Tensor]:
    return {name: store.read(name, 10**9)() for name in store.names}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_an_output_layer_that_is_tied_reads_as_the_embedding(tmp_path: Path) -> None:
    tied, _ = open_store(make_checkpoint(tmp_path, "Qwen3ForCausalLM", tied=True))
    assert tied.stored_as("lm_head.weight") == EMBED
    assert torch.equal(tied.read("lm_head.weight", 3)(), tied.read(EMBED, 3)())
    tied.arena.close()


@pytest.mark.parametrize(
    ("architecture", "tied"), [*((name, False) for name in ARCHITECTURES), ("Qwen3ForCausalLM", True)]
)
def test_every_tensor_of_a_checkpoint_reads_back_bit_for_bit(
    architecture: str, tied: bool, tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path, architecture, tied=tied, seed=3)
    store, model = open_store(folder)
    checkpoint = load_file(folder / "model.safetensors")

    assert store.names == checkpoint.keys()
    assert same(snapshot(store), checkpoint)
    assert store.num_bytes >= sum(tensor.nbytes for tensor in checkpoint.values())
    begin, end = store.arena.address, store.arena.address + store.num_bytes
    assert all(
        begin <= each.data_ptr() and each.data_ptr() + each.nbytes <= end for each in model.parameters()
    )
    assert all(each.data_ptr() % 256 == 0 and not each.requires_grad for each in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_read_returns_the_first_rows_as_float32_copies(path: Path, dtype: torch.dtype) -> None:
    store, _ = open_store(path, dtype)
    rows = store.read(EMBED, 3)()
    rows.fill_(0)

    assert rows.shape == (3, 64)
    assert rows.dtype == torch.float32
    assert store.read(EMBED, 3)().any()
    assert store.read(NORM, 5)().shape == (5,)
    with pytest.raises(RequestRejected, match=r"no parameter 'lm_tail.weight'"):
        store.read("lm_tail.weight", 1)()


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "direct", "reason"),
    [
        ("model.embed.weight", (258, 64), torch.float32, False, "no parameter of this name"),
        (QKV, (128, 64), torch.float32, False, "no parameter of this name"),
        (Q, (64, 64), torch.float32, True, "no parameter of this name"),
        (Q, (64, 63), torch.float32, False, r"expected shape \[64, 64\], got \[64, 63\]"),
        (K, (64, 64), torch.float32, False, r"expected shape \[32, 64\], got \[64, 64\]"),
        (QKV, (64, 64), torch.float32, True, r"expected shape \[128, 64\], got \[64, 64\]"),
        (NORM, (64, 1), torch.float32, False, "expected shape"),
        (NORM, (64,), torch.int8, False, "converts to it, got torch.int8"),
        (NORM, (64,), torch.int32, False, "got torch.int32"),
        (NORM, (64,), torch.float8_e4m3fn, False, "got torch.float8_e4m3fn"),
    ],
)
def test_check_refuses(
    store: WeightStore, name: str, shape: tuple[int, ...], dtype: torch.dtype, direct: bool, reason: str
) -> None:
    problem = store.check(name, shape, dtype, direct)

    assert problem is not None
    assert problem.name == name
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(problem.reason)


def test_a_tied_model_ignores_the_output_projection(tmp_path: Path) -> None:
    store, _ = open_store(make_checkpoint(tmp_path, "LlamaForCausalLM", tied=True))
    before, generation = checksum_of(store), store.generation

    assert store.ignored("lm_head.weight")
    assert store.check("lm_head.weight", (258, 64), torch.float32) is None
    assert store.write("lm_head.weight", torch.ones(258, 64), None) == 0
    assert store.covered("lm_head.weight") == frozenset()
    assert (checksum_of(store), store.generation) == (before, generation)


def test_writing_in_place_converts_and_bumps_the_generation(path: Path) -> None:
    store, model = open_store(path, torch.bfloat16)
    generation, value = store.generation, torch.full((32, 64), 1.001, dtype=torch.float64)

    num_bytes = store.write(K, value, None)

    assert num_bytes == 32 * 64 * 2
    assert store.generation > generation
    assert torch.equal(store.read(K, 32)(), value.bfloat16().float())
    assert torch.equal(model.get_parameter(QKV)[64:96].float(), value.bfloat16().float())


def test_direct_writes_name_the_engines_own_parameters(store: WeightStore) -> None:
    value = torch.randn(128, 64)

    store.write(QKV, value, None, direct=True)

    assert torch.equal(store.read(Q, 64)(), value[:64])
    assert torch.equal(store.read(K, 32)(), value[64:96])
    assert store.covered(QKV, direct=True) == {Q, K, Q.replace("q_proj", "v_proj")}
    assert store.covered(Q) == {Q}


def test_a_staged_update_is_invisible_until_it_is_committed(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_store, "LOCAL_SLICE_BYTES", 1000)
    before, checksum, generation = snapshot(store), checksum_of(store), store.generation
    addresses = store.arena.address
    new = {Q: torch.randn(64, 64), NORM: torch.randn(64)}
    with closing(finish(store.arena.stage())) as shadow:
        for name, value in new.items():
            store.write(name, value, shadow)
        slices = list(store.complete(shadow, set(new)))

        assert max(slices) <= 1000
        assert sum(slices) == sum(value.nbytes for name, value in before.items() if name not in new)
        assert (checksum_of(store), store.generation) == (checksum, generation)

        store.commit(shadow)

        assert same(snapshot(store), before | new)
        assert store.generation == generation + 1
        assert store.arena.address == addresses

        # The shadow holds the former weights: swapping back restores them bit for bit.
        store.commit(shadow)
        assert checksum_of(store) == checksum


def test_forgetting_the_shadow_is_a_rollback(store: WeightStore) -> None:
    checksum, before = checksum_of(store), snapshot(store)
    with closing(finish(store.arena.stage())) as shadow:
        store.write(EMBED, torch.zeros(258, 64), shadow)

    assert checksum_of(store) == checksum
    assert same(snapshot(store), before)


def test_updates_of_a_vision_tower_are_accepted_and_set_aside(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "Qwen3_5ForConditionalGeneration")
    store = RunnerDriver(folder).runner.weight_store
    checkpoint = load_file(folder / "model.safetensors")
    vision = {name: tensor for name, tensor in checkpoint.items() if name.startswith("model.visual.")}
    assert vision
    assert store.names == checkpoint.keys() - vision.keys()
    before = snapshot(store)
    for name, tensor in vision.items():
        assert store.check(name, tuple(tensor.shape), tensor.dtype) is None
        assert store.write(name, tensor + 1, None) == 0
    assert same(snapshot(store), before)


def test_copies_are_planned_of_memory_that_lives_until_they_run() -> None:
    """Queries, keys and values in one tensor are put together anew of what a rank holds of each."""
    config = Qwen3_5TextConfig(
        num_hidden_layers=2,
        hidden_size=128,
        intermediate_size=256,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        layer_types=["linear_attention", "full_attention"],
    )
    model = build_model("Qwen3_5ForCausalLM", config, torch.bfloat16, torch.device("cpu"))
    second: Any = SimpleNamespace(rank=1, size=2, smallest=lambda number: number)
    saver = VirtualMemorySaver(HostVirtualMemory())
    store = WeightStore(model, saver, group=second, quantization=Quantization())
    copies, planned = WeightCopies(torch.device("cpu")), {}
    for name in ("in_proj_qkv", "in_proj_z", "out_proj"):
        full_name = f"model.layers.0.linear_attn.{name}.weight"
        sent = torch.zeros(store.shape(full_name), dtype=torch.bfloat16)
        planned[name] = store.plan(copies, full_name, sent, None)

    assert planned == {"in_proj_qkv": False, "in_proj_z": True, "out_proj": True}
    store.arena.close()
