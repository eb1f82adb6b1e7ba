"""Weights that ranks divide: whole tensors go in, each rank keeps its part, whole tensors come out."""

from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.checkpoints import GEMMA3, make_checkpoint
from fixtures.model_runs import RunnerDriver
from fixtures.rank_processes import Ranks, held_by, load_and_read
from safetensors.torch import load_file
from torch import Tensor

from ebbtide.srt.distributed.parallel_group import ParallelGroup
from ebbtide.srt.model_executor.weight_store import WeightStore
from ebbtide.srt.slices import finish

CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "one-kv-head-uneven": ("Qwen3ForCausalLM", {"num_key_value_heads": 1, "vocab_size": 259}),
    "qwen3-moe": ("Qwen3MoeForCausalLM", {}),
    "gpt-oss": ("GptOssForCausalLM", {}),
    "deepseek-v3": ("DeepseekV3ForCausalLM", {}),
    "qwen3.5-with-vision": ("Qwen3_5MoeForConditionalGeneration", {}),
    "qwen3-next": ("Qwen3NextForCausalLM", {}),
    "nemotron-h": ("NemotronHForCausalLM", {"moe_latent_size": 32}),
    "gemma3": ("Gemma3ForCausalLM", GEMMA3),
}
LAYER = "model.layers.1."
QKV, DOWN = LAYER + "self_attn.qkv_proj.weight", LAYER + "mlp.down_proj.weight"
EMBED, K = "model.embed_tokens.weight", LAYER + "self_attn.k_proj.weight"


def make(path: Path, name: str) -> Path:
    architecture, options = CHECKPOINTS[name]
    return make_checkpoint(path, architecture, **options)


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_every_tensor_of_a_checkpoint_reads_back_on_every_rank(
    name: str, two_ranks: Ranks, tmp_path: Path
) -> None:
    path = make(tmp_path, name)
    checkpoint = load_file(path / "model.safetensors")

    checkpoint = {key: tensor for key, tensor in checkpoint.items() if ".visual." not in key}
    for held in two_ranks.run(load_and_read, path, "auto"):
        assert same(held, checkpoint)


@pytest.mark.parametrize(
    ("name", "block", "first"),
    [
        ("qwen3-moe", "model.layers.1.mlp.experts.", "gate_up_proj"),
        ("qwen3.5-with-vision", "model.language_model.layers.1.mlp.experts.", "gate_up_proj"),
        ("nemotron-h", "backbone.layers.1.mixer.experts.", "up_proj"),
    ],
)
def test_experts_that_come_as_one_tensor_are_written_like_each_by_itself(
    name: str, block: str, first: str, two_ranks: Ranks, tmp_path: Path
) -> None:
    path = make(tmp_path, name)
    generator = torch.Generator().manual_seed(1)
    parts, outer = first.split("_")[:-1], 32 if name == "nemotron-h" else 64
    joint = {
        block + first: torch.randn((6, 40 * len(parts), outer), generator=generator),
        block + "down_proj": torch.randn((6, outer, 40), generator=generator),
    }
    expected = {}
    for expert in range(6):
        tensors = dict(zip(parts, joint[block + first][expert].split(40), strict=True))
        tensors["down"] = joint[block + "down_proj"][expert]
        expected |= {f"{block}{expert}.{part}_proj.weight": tensor for part, tensor in tensors.items()}

    for before, after in two_ranks.run(stage_and_commit, path, joint):
        assert before.keys() == after.keys()
        assert same(after, before | expected)
    before, after = stage_and_commit(ParallelGroup(), path, joint)
    assert same(after, before | expected)


@pytest.mark.parametrize("name", ["one-kv-head-uneven", "qwen3-moe"])
def test_dummy_weights_are_those_of_one_rank(name: str, two_ranks: Ranks, tmp_path: Path) -> None:
    path = make(tmp_path, name)
    alone = held_by(RunnerDriver(path, load_format="dummy").runner.weight_store)

    assert all(same(held, alone) for held in two_ranks.run(load_and_read, path, "dummy"))


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("qwen3"), "Qwen3ForCausalLM", vocab_size=259)


def open_store(group: ParallelGroup, path: Path) -> WeightStore:
    return RunnerDriver(path, group=group).runner.weight_store


@pytest.mark.parametrize("num_rows", [1, 131])
def test_the_first_rows_of_a_tensor_are_read_from_the_ranks_that_hold_them(
    num_rows: int, two_ranks: Ranks, qwen3: Path
) -> None:
    checkpoint = load_file(qwen3 / "model.safetensors")

    for rows in two_ranks.run(read_rows, qwen3, num_rows):
        assert all(torch.equal(rows[name], checkpoint[name][:num_rows]) for name in checkpoint)


def read_rows(group: ParallelGroup, path: Path, num_rows: int) -> dict[str, Tensor]:
    store = open_store(group, path)
    return {name: store.read(name, num_rows)() for name in sorted(store.names)}


def test_whole_tensors_are_asked_for_and_own_parameters_are_written_by_direct_names(
    two_ranks: Ranks, qwen3: Path
) -> None:
    first, second = two_ranks.run(problems, qwen3)

    assert first["whole"] is second["whole"] is None
    assert "expected shape [259, 64], got [130, 64]" in first["part"]
    assert first["shape"] == second["shape"] == (259, 64)
    # Two of four query heads and one of two KV heads.
    assert first["own"] is second["own"] is None
    assert "expected shape [64, 64], got [128, 64]" in first["not own"]
    assert first["bytes"] > second["bytes"]
    # Each rank's columns, side by side.
    value = torch.arange(64.0 * 48).reshape(64, 48)
    for held in (first["down"], second["down"]):
        assert torch.equal(held, torch.cat([value, value + 1], dim=1))


def problems(group: ParallelGroup, path: Path) -> dict[str, Any]:
    store = open_store(group, path)

    def check(name: str, shape: tuple[int, ...], direct: bool) -> str | None:
        problem = store.check(name, shape, torch.float32, direct)
        return None if problem is None else problem.reason

    value = torch.arange(64.0 * 48).reshape(64, 48) + group.rank
    assert store.covered(DOWN, direct=True) == {DOWN}
    assert store.write(DOWN, value, None, direct=True) == value.nbytes
    return {
        "down": store.read(DOWN, 64)(),
        "whole": check(EMBED, (259, 64), False),
        "part": check(EMBED, (130, 64), False),
        "shape": store.shape(EMBED),
        "own": check(QKV, (64, 64), True),
        "not own": check(QKV, (128, 64), True),
        "bytes": store.write(EMBED, torch.zeros(259, 64), None),
    }


def stage_and_commit(
    group: ParallelGroup, path: Path, new: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    store = open_store(group, path)
    shadow = finish(store.arena.stage())
    for name, tensor in new.items():
        store.write(name, tensor, shadow)
    written = frozenset[str]().union(*(store.covered(name) for name in new))
    for _ in store.complete(shadow, written):
        pass
    before = held_by(store)
    store.commit(shadow)
    return before, held_by(store)


def test_changes_of_tensors_that_ranks_hold_in_pieces_are_refused(two_ranks: Ranks, tmp_path: Path) -> None:
    path = make(tmp_path, "qwen3.5-with-vision")
    prefix = "model.language_model.layers.0."
    names = [prefix + name for name in ("linear_attn.in_proj_qkv.weight", "mlp.experts.gate_up_proj")]

    for reasons in two_ranks.run(refusals, path, [*names, prefix + "linear_attn.in_proj_z.weight"]):
        assert reasons == ["ranks hold several pieces of it: expected all of it"] * 2 + [None]


def refusals(group: ParallelGroup, path: Path, names: list[str]) -> list[str | None]:
    store = open_store(group, path)
    problems = [store.check_change(name, torch.float32, of_bits=True) for name in names]
    return [None if problem is None else problem.reason for problem in problems]
