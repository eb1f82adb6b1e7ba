"""The calls of each framework, as its client makes them: method, path and body, and what must come back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fixtures.checkpoints import make_checkpoint
from fixtures.servers import Server, running_server
from fixtures.trainer_process import TrainerProcess

RECORDED = Path(__file__).parents[1] / "fixtures" / "wire"
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
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    first, second = (make_checkpoint(folder / name, "Qwen3ForCausalLM", seed=ord(name)) for name in "ab")
    return first, second


@pytest.fixture(scope="module")
def shared_server(checkpoints: tuple[Path, Path]) -> Iterator[Server]:
    with running_server(checkpoints[0], "--log-level", "warning") as server:
        yield server


@pytest.fixture
def server(shared_server: Server, checkpoints: tuple[Path, Path]) -> Server:
    """As it was at its start."""
    for path, body in {
        "/abort_weight_update": {},
        "/resume_memory_occupation": {},
        "/continue_generation": {},
        "/update_weights_from_disk": {"model_path": str(checkpoints[0]), "weight_version": "default"},
    }.items():
        shared_server.post(path, body).raise_for_status()
    return shared_server


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
    server: Server, trainer: TrainerProcess, checkpoints: tuple[Path, Path], framework: str
) -> None:
    for number, call in enumerate(json.loads((RECORDED / f"{framework}.json").read_text())):
        where = f"{framework}, call {number}, {call['method']} {call['path']}"
        body = {}
        if "body" in call:
            body = {"json": filled(call["body"], trainer, checkpoints[1])}
        response = server.client.request(
            call["method"], call["path"], params=call.get("query"), headers=call.get("headers"), **body
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
    assert server.get("/health_generate").status_code == 200
