"""Weights that a trainer broadcasts: the engine is the new model afterwards or, where it failed, the old."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.broadcasting_trainer import BroadcastingTrainer, announcement
from fixtures.gpu_device import DEVICE
from fixtures.layouts import ONE_RANK, TWO_REPLICAS
from fixtures.references import Reference
from safetensors.torch import load_file

from ebbtide import Engine
from ebbtide.srt.errors import RequestRejected
from ebbtide.trainer import WeightSender

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 16, "ignore_eos": True}
PROMPTS = [[3, 1, 4, 1, 5], list(range(40)), [200]]
ALL_ROWS = 10**6
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module", params=[ONE_RANK if DEVICE.is_cuda else TWO_REPLICAS])
def shared_engine(request: pytest.FixtureRequest, checkpoint_a: Path) -> Iterator[Engine]:
    arguments = {"max_total_tokens": 4096, "skip_tokenizer_init": True, **DEVICE.server_args}
    with Engine(model_path=str(checkpoint_a), **arguments, **request.param.server_args) as engine:
        yield engine


@pytest.fixture
def engine(shared_engine: Engine, checkpoint_a: Path) -> Engine:
    """The shared engine with the weights of A and no group, whatever the test before left."""
    shared_engine.abort_weight_update()
    shared_engine.destroy_weights_update_group("g")
    shared_engine.update_weights_from_disk(str(checkpoint_a), weight_version="a")
    return shared_engine


@pytest.fixture
def trainer() -> Iterator[BroadcastingTrainer]:
    with BroadcastingTrainer() as process:
        yield process


def num_ranks(engine: Engine) -> int:
    return engine.server_args.tp_size * engine.server_args.dp_size


def join(engine: Engine, trainer: BroadcastingTrainer, backend: str = "gloo") -> dict[str, Any]:
    reply = engine.init_weights_update_group(**trainer.join("g", 1 + num_ranks(engine), backend))
    trainer.hear()
    return reply


def outputs(engine: Engine) -> list[list[int]]:
    """Of every replica, which all say the same."""
    replicas = [
        [
            output["output_ids"]
            for output in engine.generate(input_ids=PROMPTS, sampling_params=GREEDY, routed_dp_rank=dp_rank)
        ]
        for dp_rank in range(engine.server_args.dp_size)
    ]
    assert all(outputs == replicas[0] for outputs in replicas)
    return replicas[0]


def assert_holds(engine: Engine, folder: Path) -> None:
    """Every weight bit for bit."""
    weights = load_file(folder / WEIGHTS)
    assert {name: engine.get_weights_by_name(name, ALL_ROWS) for name in weights} == {
        name: tensor.tolist() for name, tensor in weights.items()
    }


def assert_serves(engine: Engine, folder: Path, reference: Reference) -> None:
    """Every weight, and what comes of them."""
    assert_holds(engine, folder)
    assert outputs(engine) == [reference.greedy(prompt, GREEDY["max_new_tokens"]) for prompt in PROMPTS]


def first_half(announced: dict[str, Any]) -> dict[str, Any]:
    num_tensors = len(announced["names"]) // 2
    return {field: values[:num_tensors] for field, values in announced.items()}


@pytest.mark.parametrize(("end", "in_session"), [("freeze", False), ("kill", True)])
def test_a_trainer_that_disappears_in_mid_broadcast(
    engine: Engine,
    trainer: BroadcastingTrainer,
    checkpoint_a: Path,
    checkpoint_b: Path,
    reference_a: Reference,
    end: str,
    in_session: bool,
) -> None:
    join(engine, trainer)
    announced = announcement(checkpoint_b / WEIGHTS)
    if in_session:
        engine.begin_weight_update()
        trainer.tell("half", "g", checkpoint_b / WEIGHTS)
        reply = engine.update_weights_from_distributed(**first_half(announced), group_name="g")
        trainer.hear()
        assert reply["committed"] is False
    with ThreadPoolExecutor(1) as pool:
        timeout_s = 2.0 if end == "freeze" else 250.0
        updating = pool.submit(
            engine.update_weights_from_distributed, **announced, group_name="g", timeout_s=timeout_s
        )
        trainer.tell("half", "g", checkpoint_b / WEIGHTS)
        trainer.hear()
        getattr(trainer, end)()
        with pytest.raises(RequestRejected, match=r"nothing of (it|the update) is served") as refusal:
            updating.result()
        assert refusal.value.status == 400
    assert_serves(engine, checkpoint_a, reference_a)
    assert engine.weight_version == "a"
    with pytest.raises(RequestRejected, match=r"no group 'g' \(left: .*known: none"):
        engine.update_weights_from_distributed(**announced, group_name="g")
    with BroadcastingTrainer() as another:
        join(engine, another)
        another.tell("plain", "g", checkpoint_b / WEIGHTS)
        engine.update_weights_from_distributed(**announced, group_name="g")
    if in_session:
        assert_holds(engine, checkpoint_a)
        assert engine.end_weight_update("b")["committed"] is True
    assert_holds(engine, checkpoint_b)


@pytest.mark.gpu
@pytest.mark.multi_gpu
@pytest.mark.skipif(not DEVICE.is_cuda, reason="needs engines on CUDA")
@pytest.mark.parametrize("tp_size", [1, 2])
def test_nccl_from_one_gpu_to_others(checkpoint_a: Path, checkpoint_b: Path, tp_size: int) -> None:
    """From three trainers, of which two disappear in the middle; the last one is a `WeightSender`."""
    if torch.accelerator.device_count() <= tp_size:
        pytest.skip(f"needs {tp_size + 1} GPUs")
    device = f"cuda:{tp_size}"
    announced = announcement(checkpoint_b / WEIGHTS)
    arguments = {"max_total_tokens": 8192, "tp_size": tp_size, **DEVICE.server_args}
    with (
        BroadcastingTrainer(device) as first,
        BroadcastingTrainer(device) as second,
        Engine(model_path=str(checkpoint_a), **arguments) as engine,
    ):
        join(engine, first, backend="nccl")
        for command, load_format, folder in (
            ("plain", None, checkpoint_b),
            ("async", None, checkpoint_a),
            ("bucket", "flattened_bucket", checkpoint_b),
        ):
            first.tell(command, "g", folder / WEIGHTS)
            engine.update_weights_from_distributed(**announced, group_name="g", load_format=load_format)
            first.hear()
            assert_holds(engine, folder)
        assert_refused_without(first.freeze, first, engine, checkpoint_a)
        assert_holds(engine, checkpoint_b)
        join(engine, second, backend="nccl")
        second.tell("plain", "g", checkpoint_a / WEIGHTS)
        engine.update_weights_from_distributed(**announced, group_name="g")
        second.hear()
        assert_holds(engine, checkpoint_a)
        assert_refused_without(second.kill, second, engine, checkpoint_b)
        assert_holds(engine, checkpoint_a)
        with WeightSender(engine, transport="broadcast", bucket_bytes=64 << 10, retries=0) as sender:
            for version, folder in (("b", checkpoint_b), ("a", checkpoint_a)):
                sender.send(load_file(folder / WEIGHTS, device=device).items(), version=version)
                assert engine.weight_version == version
                assert_holds(engine, folder)
        assert engine.server_info()["weight_update"]["groups"] == []


def assert_refused_without(
    disappear: Callable[[], None], trainer: BroadcastingTrainer, engine: Engine, folder: Path
) -> None:
    """Half of these weights come, then nobody is there; the request has its end, and its group."""
    with ThreadPoolExecutor(1) as pool:
        updating = pool.submit(
            engine.update_weights_from_distributed,
            **announcement(folder / WEIGHTS),
            group_name="g",
            timeout_s=3.0,
        )
        trainer.tell("half", "g", folder / WEIGHTS)
        trainer.hear()
        disappear()
        with pytest.raises(RequestRejected, match=r"nothing of (it|the update) is served"):
            updating.result()
    assert engine.server_info()["weight_update"]["groups"] == []
