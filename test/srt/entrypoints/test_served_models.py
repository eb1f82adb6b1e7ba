"""What a request's `model` means, without an engine."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fixtures.deadlines import HANG_S

from ebbtide.srt.entrypoints.served_models import ServedModels
from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.io_struct import AdapterReport
from ebbtide.srt.memory_saver import MemoryTag

pytestmark = pytest.mark.unit


class ScriptedEngine:
    """An engine whose loads last until they are let go on."""

    def __init__(self) -> None:
        self.state: Any = SimpleNamespace(model_path="/models/tide", adapters=[], ranks=[])
        self.loads: list[dict[str, Any]] = []
        self.may_end = asyncio.Event()
        self.refusal: RequestRejected | None = None
        self.reported = asyncio.Event()

    def report(self, weights: str) -> None:
        self.state.ranks = [SimpleNamespace(tags={MemoryTag.WEIGHTS: SimpleNamespace(state=weights)})]
        self.reported.set()

    async def next_report(self) -> None:
        self.reported.clear()
        await self.reported.wait()

    async def control(self, kind: type[Any], fields: Any) -> Any:
        self.loads.append(fields)
        await self.may_end.wait()
        if self.state.ranks and self.state.ranks[0].tags[MemoryTag.WEIGHTS].state == "released":
            raise RequestRejected("the weights were released in between", 409)
        if self.refusal is not None:
            raise self.refusal
        leaving = fields.get("instead_of")
        self.state.adapters = [one for one in self.state.adapters if one.name != leaving]
        self.state.adapters.append(AdapterReport(name=fields["lora_name"], version=fields["lora_version"]))


def models(
    engine: ScriptedEngine, folder: Path | None = None, adapters: object = True, limit: int | None = None
) -> ServedModels:
    model = SimpleNamespace(served_model_name="tide", names_answered=("tide",), adapters=adapters)
    args = SimpleNamespace(
        lora_paths=None, lora_folder=None if folder is None else str(folder), max_loaded_loras=limit
    )
    config: Any = SimpleNamespace(model=model, server_args=args)
    return ServedModels(config, engine)


def shelve(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).mkdir()
        (folder / name / "adapter_config.json").touch()


async def find(served: ServedModels, name: str) -> str | None:
    async with served.held(name) as found:
        return found


def test_without_adapters_the_refusal_says_how_to_have_some() -> None:
    served = models(ScriptedEngine(), adapters=None)
    assert [served.require(name) for name in (None, "tide", "/models/tide/")] == [None] * 3
    with pytest.raises(RequestRejected, match="LoRA is not enabled: --enable-lora") as refused:
        served.require("tide:run")
    assert refused.value.status == 404


def test_those_that_ask_meanwhile_wait_for_the_same_load(tmp_path: Path) -> None:
    shelve(tmp_path, "run")

    async def ask() -> None:
        engine = ScriptedEngine()
        served = models(engine, tmp_path)
        asking = [asyncio.create_task(find(served, "run")) for _ in range(3)]
        while not engine.loads:
            await asyncio.sleep(0.001)
        asking.pop().cancel()
        engine.may_end.set()
        assert await asyncio.gather(*asking) == ["run", "run"], "a client that went away has ended no load"
        [fields] = engine.loads
        assert (fields["lora_path"], fields["may_leave"]) == (str(tmp_path / "run"), True)

    asyncio.run(ask())


def test_a_refused_load_whose_clients_have_gone_is_no_error_of_the_loop(tmp_path: Path) -> None:
    shelve(tmp_path, "run")

    async def ask() -> list[Any]:
        faults: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: faults.append(context))
        engine = ScriptedEngine()
        engine.refusal = RequestRejected("it does not fit")
        served = models(engine, tmp_path)
        asking = asyncio.create_task(find(served, "run"))
        while not engine.loads:
            await asyncio.sleep(0.001)
        asking.cancel()
        await asyncio.wait([asking])
        engine.may_end.set()
        while served._loads:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        return faults

    assert asyncio.run(ask()) == []


def test_a_load_that_is_refused_is_tried_again(tmp_path: Path) -> None:
    shelve(tmp_path, "run")

    async def ask() -> None:
        engine = ScriptedEngine()
        engine.may_end.set()
        served = models(engine, tmp_path)
        engine.refusal = RequestRejected("it does not fit")
        for _ in range(2):
            with pytest.raises(RequestRejected, match="it does not fit"):
                await find(served, "run")
        engine.refusal = None
        assert await find(served, "tide:run@1") == "run@1"
        assert await find(served, "run@1") == "run@1"
        with pytest.raises(RequestRejected, match="there is no 'run@2' here"):
            await find(served, "run@2")
        assert len(engine.loads) == 3

    asyncio.run(ask())


@pytest.mark.parametrize("limit", [1, 3])
def test_of_more_adapters_than_there_is_room_for_none_leaves_before_its_requests_are_sent(
    tmp_path: Path, limit: int
) -> None:
    names = [f"run-{index}" for index in range(10)]
    shelve(tmp_path, *names)

    async def ask() -> None:
        engine = ScriptedEngine()
        engine.may_end.set()
        served = models(engine, tmp_path, limit=limit)

        async def send(name: str) -> None:
            async with served.held(name) as found:
                for _ in range(5):
                    await asyncio.sleep(0)
                    assert served.has_adapter(name), "it has left before the request has come"
                assert found == name
            assert len(engine.state.adapters) <= limit

        await asyncio.wait_for(asyncio.gather(*map(send, names * 3)), HANG_S)

    asyncio.run(ask())


def test_the_adapter_that_was_asked_for_least_recently_leaves(tmp_path: Path) -> None:
    shelve(tmp_path, *"abc")

    async def ask() -> None:
        engine = ScriptedEngine()
        engine.may_end.set()
        served = models(engine, tmp_path, limit=2)
        for name in "abac":
            await find(served, name)
        assert [one.name for one in engine.state.adapters] == ["a", "c"]

    asyncio.run(ask())


def test_while_the_weights_are_released_a_request_waits_for_its_adapter(tmp_path: Path) -> None:
    shelve(tmp_path, "run")

    async def ask() -> None:
        engine = ScriptedEngine()
        served = models(engine, tmp_path)
        engine.report("resident")
        asking = asyncio.create_task(find(served, "run"))
        while not engine.loads:
            await asyncio.sleep(0.001)
        engine.report("released")
        engine.may_end.set()
        for _ in range(10):
            await asyncio.sleep(0.001)
        assert not asking.done()
        assert len(engine.loads) == 1, "nothing is tried meanwhile"
        engine.report("resident")
        assert await asyncio.wait_for(asking, HANG_S) == "run"

    asyncio.run(ask())
