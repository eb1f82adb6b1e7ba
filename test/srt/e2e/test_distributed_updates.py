"""Weights that a trainer broadcasts: the engine is the new model afterwards or, where it failed, the old."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.broadcasting_trainer import BroadcastingTrainer, announcement
from fixtures.engines import Engines
from fixtures.gpu_device import DEVICE
from fixtures.references import Reference
from fixtures.servers import running_server, wait_until
from safetensors.torch import load_file

from ebbtide import Engine
from ebbtide.srt.errors import RequestRejected
from ebbtide.trainer import WeightSender

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 16, "ignore_eos": True}
PROMPTS = [[3, 1, 4, 1, 5], list(range(40)), [200]]
ALL_ROWS = 10**6
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    with Engines() as engines:
        yield engines


FOUR_RANKS: dict[str, Any] = {"tp_size": 2, "dp_size": 2, "max_total_tokens": 4096}
on_one_rank_and_on_four = pytest.mark.parametrize(
    "engine", [{}, FOUR_RANKS], indirect=True, ids=["one-rank", "four-ranks"]
)
on_four_ranks = pytest.mark.parametrize("engine", [FOUR_RANKS], indirect=True)


@pytest.fixture
def engine(engines: Engines, checkpoint_a: Path, request: pytest.FixtureRequest) -> Engine:
    """The shared engine with the weights of A and no group, whatever the test before left."""
    engine = engines(checkpoint_a, **getattr(request, "param", {}))
    engine.abort_weight_update()
    for name in ("g", "other"):
        engine.destroy_weights_update_group(name)
    engine.update_weights_from_disk(str(checkpoint_a), weight_version="a")
    return engine


@pytest.fixture
def trainer() -> Iterator[BroadcastingTrainer]:
    with BroadcastingTrainer() as process:
        yield process


@pytest.fixture(scope="module")
def shared_trainer() -> Iterator[BroadcastingTrainer]:
    with BroadcastingTrainer() as process:
        yield process


@pytest.fixture
def lasting_trainer(shared_trainer: BroadcastingTrainer) -> Iterator[BroadcastingTrainer]:
    """The shared trainer, which a test leaves as it was: heard to the end of what it was told."""
    yield shared_trainer
    shared_trainer.leave()


def num_ranks(engine: Engine) -> int:
    return engine.server_args.tp_size * engine.server_args.dp_size


def join(engine: Engine, trainer: BroadcastingTrainer, name: str = "g", **fields: Any) -> dict[str, Any]:
    reply = engine.init_weights_update_group(
        **trainer.join(name, **{"world_size": 1 + num_ranks(engine), **fields})
    )
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


@on_one_rank_and_on_four
@pytest.mark.parametrize(
    ("command", "load_format"), [("plain", None), ("async", None), ("bucket", "flattened_bucket")]
)
def test_new_weights_serve_and_old_ones_come_back(
    engine: Engine,
    lasting_trainer: BroadcastingTrainer,
    checkpoint_a: Path,
    checkpoint_b: Path,
    reference_a: Reference,
    reference_b: Reference,
    command: str,
    load_format: str | None,
) -> None:
    reply = join(engine, lasting_trainer)
    assert (reply["changed"], reply["replaced"]) == (True, False)
    for version, folder, reference in (("b", checkpoint_b, reference_b), ("a2", checkpoint_a, reference_a)):
        lasting_trainer.tell(command, "g", folder / WEIGHTS)
        reply = engine.update_weights_from_distributed(
            **announcement(folder / WEIGHTS), group_name="g", load_format=load_format, weight_version=version
        )
        lasting_trainer.hear()
        weights = load_file(folder / WEIGHTS).values()
        assert (reply["committed"], reply["staged"], reply["content"]) == (True, True, "valid")
        assert reply["num_tensors"] == len(weights)
        whole_bytes = engine.server_args.dp_size * sum(tensor.nbytes for tensor in weights)
        if engine.server_args.tp_size == 1:
            assert reply["num_bytes"] == whole_bytes
        else:  # some tensors are whole on every rank
            assert whole_bytes < reply["num_bytes"] < 1.1 * whole_bytes
        assert reply["weight_version"] == engine.weight_version == version
        assert_serves(engine, folder, reference)


def test_requests_run_on_while_a_group_and_its_broadcasts_are_awaited(
    engine: Engine, trainer: BroadcastingTrainer, checkpoint_b: Path, reference_b: Reference
) -> None:
    before = outputs(engine)
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(engine.init_weights_update_group, **trainer.join("other", world_size=3))
        assert outputs(engine) == before
        assert not joining.done()
        wait_until(
            lambda: engine.destroy_weights_update_group("other")["changed"], "the group is being joined"
        )
        with pytest.raises(RequestRejected, match="was not joined: destroy_weights_update_group") as refusal:
            joining.result(timeout=60)
        assert refusal.value.status == 400
    trainer.kill()
    with BroadcastingTrainer() as trainer, ThreadPoolExecutor(1) as pool:
        join(engine, trainer)
        updating = pool.submit(
            engine.update_weights_from_distributed, **announcement(checkpoint_b / WEIGHTS), group_name="g"
        )
        assert outputs(engine) == before
        assert not updating.done()
        trainer.tell("plain", "g", checkpoint_b / WEIGHTS)
        assert updating.result(timeout=60)["committed"] is True
    assert_serves(engine, checkpoint_b, reference_b)


@on_four_ranks
def test_what_does_not_fit_is_refused_before_it_is_received(
    engine: Engine, lasting_trainer: BroadcastingTrainer, checkpoint_a: Path, checkpoint_b: Path
) -> None:
    join(engine, lasting_trainer)
    announced = announcement(checkpoint_b / WEIGHTS)
    wrong = {**announced, "shapes": [[7, 7], *announced["shapes"][1:]]}
    with pytest.raises(RequestRejected) as refusal:
        engine.update_weights_from_distributed(**wrong, group_name="g")
    assert refusal.value.status == 400
    assert [error["name"] for error in refusal.value.body["errors"]] == [announced["names"][0]]
    for field, message in (("names", "got 1, "), ("dtypes", "got "), ("shapes", "got ")):
        with pytest.raises(RequestRejected, match=re.escape(message)):
            engine.update_weights_from_distributed(
                **{**announced, field: announced[field][:1]}, group_name="g"
            )
    assert_holds(engine, checkpoint_a)
    # Nothing was broadcast, and nothing was taken: the group is in step.
    lasting_trainer.tell("plain", "g", checkpoint_b / WEIGHTS)
    engine.update_weights_from_distributed(**announced, group_name="g")
    lasting_trainer.hear()
    assert_holds(engine, checkpoint_b)


@pytest.mark.parametrize(
    ("engine", "end", "in_session"),
    [({}, "freeze", False), ({}, "kill", True), (FOUR_RANKS, "kill", False), (FOUR_RANKS, "freeze", True)],
    indirect=["engine"],
)
def test_a_trainer_that_disappears_in_mid_broadcast(
    engine: Engine,
    trainer: BroadcastingTrainer,
    lasting_trainer: BroadcastingTrainer,
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
            updating.result(timeout=60)
        assert refusal.value.status == 400
    assert_serves(engine, checkpoint_a, reference_a)
    assert engine.weight_version == "a"
    with pytest.raises(RequestRejected, match=r"no group 'g' \(left: .*known: none"):
        engine.update_weights_from_distributed(**announced, group_name="g")
    join(engine, lasting_trainer)
    lasting_trainer.tell("plain", "g", checkpoint_b / WEIGHTS)
    engine.update_weights_from_distributed(**announced, group_name="g")
    lasting_trainer.hear()
    if in_session:
        assert_holds(engine, checkpoint_a)
        assert engine.end_weight_update("b")["committed"] is True
    assert_holds(engine, checkpoint_b)


@on_four_ranks
def test_what_a_failed_update_took_from_its_session_is_the_old_again(
    engine: Engine, trainer: BroadcastingTrainer, checkpoint_a: Path, checkpoint_b: Path
) -> None:
    """Parameters that only other updates of the session wrote are the new."""
    join(engine, trainer)
    announced = announcement(checkpoint_b / WEIGHTS)
    old, new = load_file(checkpoint_a / WEIGHTS), load_file(checkpoint_b / WEIGHTS)
    *failing, last = announced["names"]
    engine.begin_weight_update()
    engine.update_weights_from_tensor([(failing[0], new[failing[0]]), (last, new[last])])
    with ThreadPoolExecutor(1) as pool:
        updating = pool.submit(
            engine.update_weights_from_distributed,
            **{field: values[:-1] for field, values in announced.items()},
            group_name="g",
            timeout_s=250.0,
        )
        trainer.tell("half", "g", checkpoint_b / WEIGHTS)
        trainer.hear()
        trainer.kill()
        with pytest.raises(RequestRejected, match=r"\b1 of its parameters had been written in this session"):
            updating.result(timeout=60)
    assert_holds(engine, checkpoint_a)
    assert engine.end_weight_update("mixed", allow_incomplete=True)["committed"] is True
    assert {name: engine.get_weights_by_name(name, ALL_ROWS) for name in old} == {
        name: (new if name == last else old)[name].tolist() for name in old
    }


@on_four_ranks
def test_stale_weights_stay_stale_where_half_of_the_new_ones_came(
    engine: Engine,
    trainer: BroadcastingTrainer,
    lasting_trainer: BroadcastingTrainer,
    checkpoint_b: Path,
    reference_b: Reference,
) -> None:
    join(engine, trainer)
    announced = announcement(checkpoint_b / WEIGHTS)
    engine.release_memory_occupation(["weights"])
    engine.resume_memory_occupation(["weights"])
    num_missing = engine.memory_occupation()["tags"]["weights"]["num_missing"]
    first = announced["names"][0]
    reply = engine.update_weights_from_tensor([(first, load_file(checkpoint_b / WEIGHTS)[first])])
    assert (reply["staged"], reply["num_missing"]) == (False, num_missing - 1)
    with ThreadPoolExecutor(1) as pool:
        updating = pool.submit(
            engine.update_weights_from_distributed, **announced, group_name="g", timeout_s=2.0
        )
        trainer.tell("half", "g", checkpoint_b / WEIGHTS)
        trainer.hear()
        trainer.freeze()
        with pytest.raises(RequestRejected, match="at its deadline, nothing of it is served"):
            updating.result(timeout=60)
    assert engine.memory_occupation()["tags"]["weights"]["num_missing"] == num_missing
    with pytest.raises(RequestRejected, match="stale"):
        engine.get_weights_by_name(first)
    join(engine, lasting_trainer)
    lasting_trainer.tell("plain", "g", checkpoint_b / WEIGHTS)
    reply = engine.update_weights_from_distributed(**announced, group_name="g", weight_version="b")
    lasting_trainer.hear()
    assert (reply["committed"], reply["staged"], reply["content"]) == (True, False, "valid")
    assert_serves(engine, checkpoint_b, reference_b)


def test_a_new_trainer_takes_the_place_of_one_that_is_waited_for(
    engine: Engine,
    trainer: BroadcastingTrainer,
    lasting_trainer: BroadcastingTrainer,
    checkpoint_a: Path,
    checkpoint_b: Path,
) -> None:
    join(engine, trainer)
    announced = announcement(checkpoint_b / WEIGHTS)

    async def update_and_join() -> None:
        updating = asyncio.create_task(
            engine.async_update_weights_from_distributed(**announced, group_name="g")
        )
        await asyncio.sleep(0)  # It is on its way: the new group comes behind it.
        trainer.tell("half", "g", checkpoint_b / WEIGHTS)
        trainer.hear()
        trainer.freeze()
        joined = await engine.async_init_weights_update_group(**lasting_trainer.join("g"))
        assert joined["replaced"] is True
        with pytest.raises(RequestRejected, match="another group of that name"):
            await updating

    asyncio.run(asyncio.wait_for(update_and_join(), 60))
    lasting_trainer.hear()
    assert_holds(engine, checkpoint_a)
    lasting_trainer.tell("plain", "g", checkpoint_b / WEIGHTS)
    engine.update_weights_from_distributed(**announced, group_name="g")
    lasting_trainer.hear()
    assert_holds(engine, checkpoint_b)


def test_a_session_that_is_aborted_ends_what_it_waits_for(
    engine: Engine, trainer: BroadcastingTrainer, checkpoint_a: Path, checkpoint_b: Path
) -> None:
    join(engine, trainer)
    engine.begin_weight_update()

    async def update_and_abort() -> None:
        announced = announcement(checkpoint_b / WEIGHTS)
        updating = asyncio.create_task(
            engine.async_update_weights_from_distributed(**announced, group_name="g")
        )
        await asyncio.sleep(0)  # It is on its way: the abort comes behind it.
        trainer.tell("half", "g", checkpoint_b / WEIGHTS)
        assert (await engine.async_abort_weight_update())["changed"] is True
        with pytest.raises(RequestRejected, match="aborted by abort_weight_update"):
            await updating

    asyncio.run(asyncio.wait_for(update_and_abort(), 60))
    assert_holds(engine, checkpoint_a)


@on_one_rank_and_on_four
def test_a_trainer_that_does_not_come(engine: Engine, trainer: BroadcastingTrainer) -> None:
    size = num_ranks(engine) + 2
    # Torch may look for the others a little longer than it was told: then the request's deadline comes first.
    late = rf"not joined(: not every rank was done| as rank \d of {size} within 1 s)"
    with pytest.raises(RequestRejected, match=late) as refusal:
        engine.init_weights_update_group(**trainer.join("g", world_size=size), timeout_s=1.0)
    assert refusal.value.status == 400
    assert engine.server_info()["weight_update"]["groups"] == []


def test_over_http_with_the_older_fields_too(
    checkpoint_a: Path, checkpoint_b: Path, trainer: BroadcastingTrainer
) -> None:
    announced = announcement(checkpoint_b / WEIGHTS)
    with running_server(checkpoint_a, "--log-level", "warning") as server:
        fields = trainer.join("weight_update_group")
        del fields["group_name"]
        body = {**fields, "master_port": str(fields["master_port"]), "pp_rank": 0}
        assert server.post("/init_weights_update_group", body).json()["success"] is True
        trainer.hear()
        assert server.get("/server_info").json()["weight_update"]["groups"] == ["weight_update_group"]
        trainer.tell("plain", "weight_update_group", checkpoint_b / WEIGHTS)
        for field in (
            {"name": name, "dtype": f"torch.{dtype}", "shape": shape}
            for name, dtype, shape in zip(*announced.values(), strict=True)
        ):
            response = server.post("/update_weights_from_distributed", {**field, "flush_cache": False})
            assert response.status_code == 200, response.text
        trainer.hear()
        for name, tensor in load_file(checkpoint_b / WEIGHTS).items():
            body = {"name": name, "truncate_size": ALL_ROWS}
            assert server.post("/get_weights_by_name", body).json() == tensor.tolist()
        refused = server.post("/update_weights_from_distributed", {"names": ["a"]})
        assert (refused.status_code, refused.json()["success"]) == (400, False)
        assert "dtypes, shapes: required" in refused.json()["message"]
        assert server.post("/destroy_weights_update_group").json()["changed"] is True
        assert server.post("/destroy_weights_update_group").json()["changed"] is False
        assert server.get("/server_info").json()["weight_update"]["groups"] == []


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
            updating.result(timeout=60)
    assert engine.server_info()["weight_update"]["groups"] == []
