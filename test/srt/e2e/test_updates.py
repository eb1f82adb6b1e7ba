"""New weights by every road: afterwards the engine is the new model or, where refused, exactly the old."""

from __future__ import annotations

import base64
import os
import pickle
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from fixtures.checkpoints import make_checkpoint
from fixtures.engines import Engines
from fixtures.gpu_device import DEVICE
from fixtures.references import Reference
from fixtures.trainer_process import TrainerProcess

from ebbtide import Engine
from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.weight_sync.payload.bucket import FlattenedTensorBucket
from ebbtide.trainer.payload_encoding import serialize, serialize_bucket

Weights = dict[str, torch.Tensor]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 16, "ignore_eos": True}
PROMPTS = [[3, 1, 4, 1, 5], list(range(40)), [200]]
ALL_ROWS = 10**6


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    with Engines() as engines:
        yield engines


@pytest.fixture
def engine(engines: Engines, checkpoint_a: Path) -> Engine:
    """The shared engine with the weights of A, whatever the test before left."""
    engine = engines(checkpoint_a)
    engine.update_weights_from_disk(str(checkpoint_a), weight_version="a")
    return engine


def test_a_canary_lets_only_the_weights_through_that_it_is_of(
    engine: Engine, checkpoint_b: Path, reference_a: Reference, reference_b: Reference
) -> None:
    ids = PROMPTS[1]
    [of_a, of_b] = [
        [float(row[ids[1 + at]]) for at, row in enumerate(reference.logprobs(ids)[:-1])]
        for reference in (reference_a, reference_b)
    ]
    with pytest.raises(RequestRejected, match=r"the canary was missed.* at token \d+ -") as refused:
        engine.update_weights_from_disk(str(checkpoint_b), canary={"input_ids": ids, "logprobs": of_a})
    assert_serves(engine, reference_a)
    assert refused.value.body["canary"]["logprobs"][1:] == pytest.approx(of_b, abs=DEVICE.tie + 1e-3)
    reply = engine.update_weights_from_disk(str(checkpoint_b), canary={"input_ids": ids, "logprobs": of_b})
    assert (reply["committed"], reply["staged"]) == (True, True)
    assert_serves(engine, reference_b)


@pytest.fixture(scope="module")
def trainer() -> Iterator[TrainerProcess]:
    with TrainerProcess() as process:
        yield process


def outputs(engine: Engine) -> list[list[int]]:
    return [output["output_ids"] for output in engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)]


def expected_outputs(reference: Reference) -> list[list[int]]:
    return [reference.greedy(prompt, GREEDY["max_new_tokens"]) for prompt in PROMPTS]


def weights_of(engine: Engine, names: Sequence[str]) -> dict[str, list[Any]]:
    """All numbers of these weights, as the engine holds them."""
    return {name: engine.get_weights_by_name(name, ALL_ROWS) for name in names}


def assert_serves(engine: Engine, reference: Reference) -> None:
    """Every weight bit for bit, and what comes of them."""
    weights = reference.weights()
    assert weights_of(engine, list(weights)) == {name: tensor.tolist() for name, tensor in weights.items()}
    assert outputs(engine) == expected_outputs(reference)


# ------------------------------------------------------------------------------------------------- accepted


def fused(weights: Weights) -> Weights:
    """The engine's own parameters, as `load_format="direct"` takes them."""
    groups = {
        "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    }
    result = dict(weights)
    for name in weights:
        for whole, parts in groups.items():
            if parts[0] in name:
                result[name.replace(parts[0], whole)] = torch.cat(
                    [result.pop(name.replace(parts[0], part)) for part in parts]
                )
    return result


def send(engine: Engine, form: str, weights: Weights, folder: Path, version: str) -> dict[str, Any]:
    """Update by one of the roads; `folder` is the checkpoint that `weights` come from."""
    named = list(weights.items())
    match form:
        case "disk":
            return engine.update_weights_from_disk(str(folder), weight_version=version)
        case "pairs":
            return engine.update_weights_from_tensor(named, weight_version=version)
        case "generator":
            doubles = ((name, tensor.double()) for name, tensor in named)
            return engine.update_weights_from_tensor(doubles, weight_version=version)
        case "bucket":
            bucket = FlattenedTensorBucket(named)
            entries, load_format = [serialize_bucket(bucket)], "flattened_bucket"
        case "direct":
            own = list(fused(weights).items())
            entries, load_format = [serialize(own)], "direct"
        case "safetensors":
            image = base64.b64encode((folder / "model.safetensors").read_bytes())
            return engine.update_weights_from_tensor([image.decode()], "safetensors", weight_version=version)
    return engine.update_weights_from_tensor(entries, load_format, weight_version=version)


@pytest.mark.parametrize("form", ["disk", "pairs", "generator", "bucket", "direct", "safetensors"])
def test_new_weights_serve_and_old_ones_come_back(
    engine: Engine,
    checkpoint_a: Path,
    checkpoint_b: Path,
    reference_a: Reference,
    reference_b: Reference,
    form: str,
) -> None:
    assert_serves(engine, reference_a)
    for version, reference, folder in (
        ("b", reference_b, checkpoint_b),
        ("a again", reference_a, checkpoint_a),
    ):
        weights = reference.weights()
        reply = send(engine, form, weights, folder, version)
        assert (reply["success"], reply["committed"], reply["staged"]) == (True, True, True)
        assert reply["weight_version"] == engine.weight_version == version
        assert reply["num_tensors"] == len(fused(weights) if form == "direct" else weights)
        assert reply["num_bytes"] == sum(tensor.nbytes for tensor in weights.values())
        assert_serves(engine, reference)


@pytest.mark.parametrize(
    ("kind", "load_format"),
    [
        ("named", None),
        ("bucket", "flattened_bucket"),
        ("bucket_of_dicts", "flattened_bucket"),
        ("two_ranks", None),
    ],
)
def test_a_trainer_in_a_process_of_its_own(
    engine: Engine,
    trainer: TrainerProcess,
    checkpoint_b: Path,
    reference_b: Reference,
    kind: str,
    load_format: str | None,
) -> None:
    entry = trainer.send(kind, checkpoint_b / "model.safetensors")
    engine.update_weights_from_tensor([entry], load_format, weight_version="b")
    trainer.drop()
    assert_serves(engine, reference_b)
    if kind != "two_ranks":  # The tensors of the rank that is not there are never taken.
        assert trainer.shared_objects() == set()


# -------------------------------------------------------------------------------------------------- refused


NORM = "model.norm.weight"
BAD_PAYLOADS: dict[str, tuple[Callable[[Weights], Any], str | None, str]] = {
    "wrong shape": (lambda w: {**w, NORM: w[NORM][:-1]}.items(), None, NORM),
    "fused name": (lambda w: fused(w).items(), None, "qkv_proj"),
    "not fused": (lambda w: [serialize(list(w.items()))], "direct", "q_proj"),
    "half a pickle": (lambda w: [serialize(list(w.items()))[:-40]], None, "payload"),
}


@pytest.mark.parametrize("case", BAD_PAYLOADS)
def test_a_refused_payload_changes_no_bit(
    engine: Engine, reference_a: Reference, reference_b: Reference, case: str
) -> None:
    payload, load_format, message = BAD_PAYLOADS[case]
    weights = reference_b.weights()
    with pytest.raises(RequestRejected, match=message) as refused:
        engine.update_weights_from_tensor(payload(weights), load_format, weight_version="bad")
    assert (refused.value.status, refused.value.body["success"]) == (400, False)
    assert engine.weight_version == "a"
    assert_serves(engine, reference_a)


def test_a_refused_folder_changes_no_bit(
    engine: Engine, reference_a: Reference, checkpoint_b: Path, tmp_path: Path
) -> None:
    weights = safetensors.torch.load_file(checkpoint_b / "model.safetensors")

    def folder(name: str, **tensors: torch.Tensor) -> Path:
        copy = shutil.copytree(checkpoint_b, tmp_path / name)
        safetensors.torch.save_file({**weights, **tensors}, copy / "model.safetensors", {"format": "pt"})
        return copy

    cut = folder("cut") / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-40])
    cases = {
        make_checkpoint(tmp_path / "wide", "Qwen3ForCausalLM", intermediate_size=128): "gate_proj",
        folder("more", **{"model.nothing.weight": torch.zeros(3)}): "model.nothing",
        cut.parent: "model.safetensors",
    }
    for path, message in cases.items():
        with pytest.raises(RequestRejected, match=message) as refused:
            engine.update_weights_from_disk(str(path), weight_version="bad")
        assert refused.value.status == 400
    assert engine.weight_version == "a"
    assert_serves(engine, reference_a)


class Gadget:
    """Pickles as a call of `os.system`."""

    def __init__(self, command: str) -> None:
        self._command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self._command,)


def test_a_payload_never_runs_code(engine: Engine, reference_a: Reference, tmp_path: Path) -> None:
    marker = tmp_path / "was-run"
    gadget = Gadget(f"touch {marker}")
    objects: list[Any] = [
        gadget,
        [("model.norm.weight", gadget)],
        {"flattened_tensor": gadget, "metadata": []},
        {"flattened_tensor": [], "metadata": [gadget]},
    ]
    payloads = [pickle.dumps(one, protocol=4) for one in objects]
    assert pickle.loads(payloads[0]) == 0
    assert marker.exists()
    marker.unlink()
    for payload in payloads:
        for load_format in (None, "direct", "flattened_bucket", "safetensors"):
            with pytest.raises(RequestRejected, match=r"posix\.system|safetensors") as refused:
                engine.update_weights_from_tensor([payload], load_format)
            assert refused.value.status == 400
    assert_serves(engine, reference_a)
    assert not marker.exists()


def test_a_torch_file_never_runs_code(
    engine: Engine, checkpoint_b: Path, reference_a: Reference, reference_b: Reference, tmp_path: Path
) -> None:
    marker, folder = tmp_path / "was-run", tmp_path / "model"
    shutil.copytree(checkpoint_b, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    weights: dict[str, Any] = dict(reference_b.weights())
    torch.save({**weights, "model.norm.weight": Gadget(f"touch {marker}")}, folder / "pytorch_model.bin")
    with pytest.raises(RequestRejected, match=r"pytorch_model\.bin"):
        engine.update_weights_from_disk(str(folder), "pt")
    assert not marker.exists()
    assert_serves(engine, reference_a)
    torch.save(weights, folder / "pytorch_model.bin")
    engine.update_weights_from_disk(str(folder), "pt")
    assert_serves(engine, reference_b)
