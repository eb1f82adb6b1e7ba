"""The calls of each framework, as its client makes them, to a server and to `app`: what must come back."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from fixtures.servers import running_server
from fixtures.trainer_process import TrainerProcess
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.entrypoints.http_server import _GlobalState, app, set_global_state
from sglang.srt.managers.tokenizer_manager import ServerStatus

RECORDED = Path(__file__).parents[1] / "srt" / "fixtures" / "wire"
FRAMEWORKS = sorted(path.stem for path in RECORDED.glob("*.json"))
# Placeholders of payloads → the kinds that the trainer process makes.
PAYLOADS = {
    "$NAMED_B": "named",
    "$BUCKET_B": "bucket",
    "$DICTS_B": "bucket_of_dicts",
    "$LOCAL_B": "two_ranks",
}
TYPES: dict[str, tuple[type, ...]] = {
    "<int>": (int,),
    "<number>": (int, float),
    "<string>": (str,),
    "<any>": (object,),
}


@pytest.fixture(scope="module")
def server(checkpoints: tuple[Path, Path]) -> Iterator[httpx.Client]:
    """A server in a process of its own."""
    with running_server(checkpoints[0], "--log-level", "warning", "--served-model-name", "*") as server:
        yield server.client


@pytest.fixture(scope="module")
def engine(checkpoints: tuple[Path, Path]) -> Iterator[Engine]:
    with Engine(
        model_path=str(checkpoints[0]), max_total_tokens=4096, log_level="error", served_model_name="*"
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def application(engine: Engine) -> Iterator[TestClient]:
    """The compatibility package's application, which serves the engine of this process."""
    set_global_state(_GlobalState(engine.tokenizer_manager, None, None))
    engine.tokenizer_manager.server_status = ServerStatus.Up
    with TestClient(app, base_url="http://localhost") as client:
        yield client


@pytest.fixture(params=["server", "application"])
def door(request: pytest.FixtureRequest, checkpoints: tuple[Path, Path]) -> Any:
    """One of the doors, with the engine as it was at its start."""
    door = request.getfixturevalue(request.param)
    for path, body in {
        "/abort_weight_update": {},
        "/resume_memory_occupation": {},
        "/continue_generation": {},
        "/update_weights_from_disk": {"model_path": str(checkpoints[0]), "weight_version": "default"},
    }.items():
        reply = door.request("POST", path, params=None, headers=None, json=body)
        assert reply.status_code == 200, reply.text
    return door


@pytest.fixture(scope="module")
def trainer() -> Iterator[TrainerProcess]:
    with TrainerProcess() as process:
        yield process


def filled(value: Any, trainer: TrainerProcess, checkpoint: Path) -> Any:
    """A body with what its placeholders stand for."""
    match value:
        case dict():
            return {key: filled(member, trainer, checkpoint) for key, member in value.items()}
        case list():
            return [filled(member, trainer, checkpoint) for member in value]
        case "$FOLDER_B":
            return str(checkpoint)
        case str() if value in PAYLOADS:
            return trainer.send(PAYLOADS[value], checkpoint / "model.safetensors")
        case _:
            return value


def check(expected: Any, actual: Any, where: str) -> None:
    """Assert that a reply holds what was recorded."""
    match expected:
        case str() if expected in TYPES:
            assert isinstance(actual, TYPES[expected]), f"{where}: {actual!r}"
            assert expected == "<any>" or not isinstance(actual, bool), where
        case dict():
            assert isinstance(actual, dict), f"{where}: {actual!r}"
            for key, member in expected.items():
                assert key in actual, f"{where}: no {key} in {actual!r}"
                check(member, actual[key], f"{where}.{key}")
        case list():
            assert isinstance(actual, list), f"{where}: {actual!r}"
            assert len(actual) == len(expected), where
            for index, (member, found) in enumerate(zip(expected, actual, strict=True)):
                check(member, found, f"{where}[{index}]")
        case _:
            assert (type(actual), actual) == (type(expected), expected), where


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_recorded_calls_get_their_answers(
    door: Any, trainer: TrainerProcess, checkpoints: tuple[Path, Path], framework: str
) -> None:
    for number, call in enumerate(json.loads((RECORDED / f"{framework}.json").read_text())):
        where = f"{framework}, call {number}, {call['method']} {call['path']}"
        response = door.request(
            call["method"],
            call["path"],
            params=call.get("query"),
            headers=call.get("headers"),
            json=filled(call.get("body"), trainer, checkpoints[1]),
        )
        assert response.status_code == call["status"], f"{where}: {response.text}"
        match call.get("reply"):
            case None:
                pass
            case "<empty>":
                assert response.content == b"", where
            case expected:
                check(expected, response.json(), where)
    # The last call is over, and so is what it used: the engine serves on.
    assert door.request("GET", "/health_generate").status_code == 200
