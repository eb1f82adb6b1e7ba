"""Updates that a function of the operator's writes: all ranks change together, or none."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.gpu_device import DEVICE
from fixtures.references import Reference

from ebbtide import Engine
from ebbtide.srt.errors import EngineError
from ebbtide.trainer.payload_encoding import serialize

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
PROMPTS = [[3, 1, 4, 1, 5], list(range(40)), [200]]
LOADERS = {name: f"fixtures.weight_loaders.{name}" for name in ("scale", "copy_own", "fail_where_told")}
LAYER_0, LAYER_1 = "model.layers.0.", "model.layers.1."


@pytest.fixture(scope="module", params=[1, 2] if DEVICE.is_cuda else [2], ids=lambda size: f"tp{size}")
def shared_engine(request: pytest.FixtureRequest, checkpoint_a: Path) -> Iterator[Engine]:
    if DEVICE.is_cuda and torch.accelerator.device_count() < request.param:
        pytest.skip(f"needs {request.param} GPUs")
    with Engine(
        model_path=str(checkpoint_a),
        max_total_tokens=4096,
        tp_size=request.param,
        skip_tokenizer_init=True,
        custom_weight_loader=list(LOADERS.values()),
        **DEVICE.server_args,
    ) as engine:
        yield engine


@pytest.fixture
def engine(shared_engine: Engine, checkpoint_a: Path) -> Engine:
    """With the weights of A, whatever the test before left."""
    shared_engine.abort_weight_update()
    shared_engine.resume_memory_occupation()
    shared_engine.update_weights_from_disk(str(checkpoint_a), weight_version="a")
    return shared_engine


def scaled(weights: Mapping[str, torch.Tensor], factors: Mapping[str, float]) -> dict[str, torch.Tensor]:
    """What `scale` makes of weights."""
    return {
        name: tensor * next((factor for begin, factor in factors.items() if name.startswith(begin)), 1.0)
        for name, tensor in weights.items()
    }


def assert_serves(engine: Engine, weights: Mapping[str, torch.Tensor], version: str) -> None:
    """Every weight bit for bit on every rank, and what comes of them."""
    for name, tensor in weights.items():
        assert engine.get_weights_by_name(name, 10**6) == tensor.tolist(), name
    assert engine.weight_version == version
    outputs = engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)
    assert [output["meta_info"]["weight_version"] for output in outputs] == [version] * len(PROMPTS)


def test_it_changes_the_weights_that_serve(engine: Engine, reference_a: Reference) -> None:
    tokens_before = [out["output_ids"] for out in engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)]
    factors = {LAYER_0: 2.0, LAYER_1: -0.5}
    deltas = [(begin, torch.tensor(factor)) for begin, factor in factors.items()]
    reply = engine.update_weights_from_tensor(deltas, LOADERS["scale"], weight_version="scaled")
    assert (reply["success"], reply["committed"], reply["staged"]) == (True, True, True)
    assert (reply["num_tensors"], reply["num_ignored"], reply["content"]) == (2, 0, "valid")
    assert reply["num_bytes"] == 8 * engine.server_info()["tp_size"]
    assert_serves(engine, scaled(reference_a.weights(), factors), "scaled")
    tokens = [out["output_ids"] for out in engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)]
    assert tokens != tokens_before
    back = [(begin, torch.tensor(1 / factor)) for begin, factor in factors.items()]
    engine.update_weights_from_tensor(back, LOADERS["scale"], weight_version="back")
    assert_serves(engine, reference_a.weights(), "back")
    assert [
        out["output_ids"] for out in engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)
    ] == tokens_before


def test_a_rank_is_given_its_own_entry(engine: Engine, reference_a: Reference) -> None:
    tp_size = engine.server_info()["tp_size"]
    name = "model.layers.0.mlp.down_proj.weight"
    whole = -reference_a.weights()[name]
    parts = torch.chunk(whole, tp_size, dim=1)
    entries = [serialize([(name, part.contiguous())]) for part in parts]
    engine.update_weights_from_tensor(entries, LOADERS["copy_own"], weight_version="own")
    assert_serves(engine, {**reference_a.weights(), name: whole}, "own")


def test_one_that_never_returns_ends_the_engine_and_every_rank_says_where_it_stands(
    checkpoint_a: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    loader = "fixtures.weight_loaders.hang_where_told"
    with Engine(
        model_path=str(checkpoint_a),
        max_total_tokens=4096,
        tp_size=1 if DEVICE.is_cuda else 2,
        skip_tokenizer_init=True,
        custom_weight_loader=[loader],
        watchdog_timeout=8.0,
        **DEVICE.server_args,
    ) as engine:
        last = engine.server_info()["tp_size"] - 1
        entries = [serialize([("hangs", torch.tensor(rank == last))]) for rank in range(last + 1)]
        with pytest.raises(EngineError, match=r"process ended.*has not ended within 8 s"):
            engine.update_weights_from_tensor(entries, loader)
    stacks = capfd.readouterr().err
    assert "in hang_where_told" in stacks
    assert stacks.count("Current thread") == last + 1
