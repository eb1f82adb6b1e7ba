"""An engine in the caller's process, as verl has it: by tokenizer manager, by `Engine`, and behind `app`."""

import asyncio
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import httpx
import pytest
import sglang.srt.entrypoints.engine as entrypoint
import torch
import torch.distributed as dist
from fixtures.adapters import make_adapter
from safetensors.torch import load_file
from sglang.srt.entrypoints.http_server import _GlobalState, app, health_generate, set_global_state
from sglang.srt.managers.io_struct import (
    ContinueGenerationReqInput,
    DestroyWeightsUpdateGroupReqInput,
    GenerateReqInput,
    InitWeightsUpdateGroupReqInput,
    LoadLoRAAdapterFromTensorsReqInput,
    LoRAUpdateOutput,
    PauseGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
)
from sglang.srt.managers.tokenizer_manager import ServerStatus, TokenizerManager
from sglang.srt.utils import MultiprocessingSerializer, get_open_port, init_custom_process_group

GREEDY = {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True}
PROMPT = [5, 6, 7]


class AsyncEngine(entrypoint.Engine):
    """As verl derives it: coroutines in the place of the plain methods."""

    async def release_memory_occupation(self, tags: list[str] | None = None) -> Any:  # type: ignore[override]
        obj = ReleaseMemoryOccupationReqInput(tags=tags)
        return await self.tokenizer_manager.release_memory_occupation(obj, None)

    async def resume_memory_occupation(self, tags: list[str] | None = None) -> Any:  # type: ignore[override]
        obj = ResumeMemoryOccupationReqInput(tags=tags)
        return await self.tokenizer_manager.resume_memory_occupation(obj, None)


@pytest.fixture(scope="module")
def engine(checkpoints: tuple[Path, Path]) -> Iterator[AsyncEngine]:
    seen = []
    original = entrypoint._set_envs_and_config
    # Clients put a function of theirs in the place of this one.
    entrypoint._set_envs_and_config = seen.append
    try:
        arguments: dict[str, Any] = {"skip_tokenizer_init": True, "max_total_tokens": 4096}
        lora = {"enable_lora": True, "max_lora_rank": 8, "max_loras_per_batch": 1}
        with AsyncEngine(model_path=str(checkpoints[0]), **arguments, **lora) as engine:
            assert seen == [engine.server_args]
            yield engine
    finally:
        entrypoint._set_envs_and_config = original


@pytest.fixture
def manager(engine: AsyncEngine) -> TokenizerManager:
    return engine.tokenizer_manager


async def generate(manager: TokenizerManager, **fields: Any) -> Any:
    request = GenerateReqInput(input_ids=PROMPT, image_data=None, **{"sampling_params": GREEDY, **fields})
    return await manager.generate_request(request, None).__anext__()


def weights_of(checkpoint: Path) -> list[tuple[str, Any]]:
    return list(load_file(checkpoint / "model.safetensors").items())


def test_refusals_are_told_and_logged(
    manager: TokenizerManager, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        done, message = await manager.release_memory_occupation(
            ReleaseMemoryOccupationReqInput(tags=["nothing"]), None
        )
        assert not done
        assert "weights" in message
        disk = await manager.update_weights_from_disk(
            UpdateWeightFromDiskReqInput(model_path=str(tmp_path)), None
        )
        assert (disk[0], disk[2]) == (False, 0)
        assert await manager.end_weight_update() == (False, caplog.messages[-1].partition(": ")[2])
        assert (await generate(manager))["meta_info"]["completion_tokens"] == 6

    asyncio.run(run())
    # What other tests of this process have set may let less weighty messages pass.
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 3


def test_live_requests_are_listed_and_aborted(manager: TokenizerManager) -> None:
    long = {**GREEDY, "max_new_tokens": 200}

    async def run() -> None:
        await manager.pause_generation(PauseGenerationReqInput(mode="in_place"))
        waiting = [
            asyncio.create_task(generate(manager, rid=rid, sampling_params=long)) for rid in ("one", "two")
        ]
        while len(manager.rid_to_state) < 2:
            await asyncio.sleep(0.01)
        assert set(manager.rid_to_state) == {"one", "two"}
        manager.abort_request(rid="one")
        first = await waiting[0]
        assert first["meta_info"]["finish_reason"]["type"] == "abort"
        assert set(manager.rid_to_state) == {"two"}
        manager.abort_request(abort_all=True)
        assert (await waiting[1])["meta_info"]["finish_reason"]["type"] == "abort"
        await manager.continue_generation(ContinueGenerationReqInput())
        assert manager.rid_to_state == {}

    asyncio.run(run())


def test_streams_and_loops_of_any_thread(manager: TokenizerManager) -> None:
    chunks: list[Any] = []

    async def stream() -> None:
        request = GenerateReqInput(input_ids=PROMPT, sampling_params=GREEDY, stream=True)
        async for chunk in manager.generate_request(request, None):
            chunks.append(chunk)

    thread = threading.Thread(target=lambda: asyncio.run(stream()))
    thread.start()
    thread.join()
    whole = asyncio.run(generate(manager))
    assert chunks[-1]["output_ids"] == whole["output_ids"]


def test_engines_of_clients_answer_with_tuples(engine: AsyncEngine, checkpoints: tuple[Path, Path]) -> None:
    assert asyncio.run(engine.release_memory_occupation(["kv_cache"]))[0]
    assert asyncio.run(engine.resume_memory_occupation())[0]
    assert engine.update_weights_from_tensor(weights_of(checkpoints[1]))[0]
    assert engine.begin_weight_update()[0]
    assert engine.begin_weight_update() == (False, engine.begin_weight_update()[1])
    done, _, num_paused = engine.update_weights_from_disk(str(checkpoints[0]))
    assert (done, num_paused) == (True, 0)
    assert engine.end_weight_update(weight_version="9")[0]
    assert engine.flush_cache().success
    assert engine.generate(input_ids=PROMPT, sampling_params=GREEDY)["meta_info"]["weight_version"] == "9"
    assert engine.destroy_weights_update_group()[0]


def test_adapters_are_loaded_as_sglangs_clients_do(
    engine: AsyncEngine, manager: TokenizerManager, checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    adapter = make_adapter(checkpoints[0], tmp_path)
    assert engine.load_lora_adapter("policy", str(tmp_path)).loaded_adapters == {"policy": "1"}
    payload = MultiprocessingSerializer.serialize(list(adapter.tensors.items()), output_str=True)
    request = LoadLoRAAdapterFromTensorsReqInput(
        lora_name="policy", config_dict=adapter.fields, serialized_tensors=payload
    )
    loaded = asyncio.run(manager.load_lora_adapter_from_tensors(request))
    assert loaded == LoRAUpdateOutput(success=True, loaded_adapters={"policy": "2"})
    answers = [asyncio.run(generate(manager, lora_path=f"policy@{version}")) for version in (1, 2)]
    assert answers[0]["output_ids"] == answers[1]["output_ids"] == adapter.reference.greedy(PROMPT, 6)
    assert engine.unload_lora_adapter("policy").success
    again = engine.unload_lora_adapter("policy")
    assert (again.success, "not loaded" in (again.error_message or "")) == (False, True)


def test_engines_of_clients_take_one_tensor_a_call(engine: AsyncEngine) -> None:
    of_many = engine.update_weights_from_distributed(["model.norm.weight"], [torch.float32], [[64]])
    of_one = engine.update_weights_from_distributed("model.norm.weight", torch.float32, torch.Size([64]))
    assert of_one == of_many
    assert "group" in of_one[1]


@pytest.mark.parametrize(
    "fields",
    # The last is in the words of older senders, for one tensor.
    [{"dtypes": [torch.float32]}, {"dtypes": ["torch.float32"]}, {"dtype": torch.float32}],
    ids=["dtype", "text", "one"],
)
def test_a_trainer_of_this_process_broadcasts(
    manager: TokenizerManager, checkpoints: tuple[Path, Path], fields: dict[str, Any]
) -> None:
    name, tensor = "model.norm.weight", load_file(checkpoints[1] / "model.safetensors")["model.norm.weight"]
    shape = list(tensor.shape)
    one = {"name": name, "shape": shape} if "dtype" in fields else {"names": [name], "shapes": [shape]}
    port = get_open_port()
    group = {"group_name": "policy", "backend": "gloo", "world_size": 2}

    def broadcast() -> None:
        made = init_custom_process_group(init_method=f"tcp://127.0.0.1:{port}", rank=0, **group)
        dist.broadcast(tensor, 0, group=made)
        dist.destroy_process_group(made)

    async def run() -> None:
        address = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1}
        joining = InitWeightsUpdateGroupReqInput(**address, **group)
        assert await manager.init_weights_update_group(joining, None) == (True, ANY)
        update = UpdateWeightsFromDistributedReqInput(group_name="policy", **one, **fields)
        assert await manager.update_weights_from_distributed(update, None) == (True, ANY)
        leaving = DestroyWeightsUpdateGroupReqInput(group_name="policy")
        assert (await manager.destroy_weights_update_group(leaving, None))[0]

    trainer = threading.Thread(target=broadcast)
    trainer.start()
    asyncio.run(run())
    trainer.join()
    assert manager.core.get_weights_by_name(name) == pytest.approx(tensor.tolist()[:100])


def test_plain_methods_in_a_loop_name_the_coroutine(engine: AsyncEngine) -> None:
    async def run() -> None:
        with pytest.raises(RuntimeError, match=r"tokenizer_manager\.flush_cache"):
            engine.flush_cache()

    asyncio.run(run())


def test_the_application_serves_the_engine_of_this_process(
    manager: TokenizerManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An example that ran in this process may have bound it to an engine that is gone.
    monkeypatch.setattr("sglang.srt.entrypoints.http_server._endpoints._application", None)
    routes = list(app.router.routes)

    def of(path: str) -> list[Any]:
        return [route for route in routes if getattr(route, "path", None) == path]

    async def own_health() -> dict[str, str]:
        return {"mine": "yes"}

    async def run() -> None:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            assert (await client.get("/health")).status_code == 503
            set_global_state(
                _GlobalState(tokenizer_manager=manager, template_manager=None, scheduler_info=None)
            )
            manager.server_status = ServerStatus.Up
            assert (await client.get("/health")).status_code == 200
            body = {"input_ids": PROMPT, "sampling_params": GREEDY}
            answer = (await client.post("/generate", json=body)).json()
            assert answer["output_ids"] == (await generate(manager))["output_ids"]

            app.router.routes.remove(of("/health")[0])
            app.add_api_route("/own_health", own_health, methods=["GET"])
            app.add_api_route("/own_health_generate", health_generate, methods=["GET"])
            assert (await client.get("/health")).status_code == 404
            assert (await client.get("/own_health")).json() == {"mine": "yes"}
            assert (await client.get("/own_health_generate")).status_code == 200

    assert of("/generate")
    assert of("/update_weights_from_tensor")
    try:
        asyncio.run(run())
    finally:
        app.router.routes[:] = routes
