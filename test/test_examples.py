"""The examples, and what the documentation shows: every command and every reply, in the order of the page."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fixtures.checkpoints import make_checkpoint
from fixtures.servers import ENVIRONMENT, Server, running_server

ROOT = Path(__file__).parent.parent
CONTROL_PLANE = ROOT / "docs" / "control_plane.md"
TESTING = ROOT / "docs" / "testing_controllers.md"
# A command, and the reply behind it.
COMMAND_AND_REPLY = re.compile(r"```sh\n(.*?)```\n+```json\n(.*?)```", re.DOTALL)
# What differs from run to run and from machine to machine.
VARIES = re.compile(r"device_free_bytes|total_bytes|free_bytes|unmanaged_bytes|pid|id|text|output_ids")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Those of docs/control_plane.md: the one that is served, and other weights of its shape."""
    folder = tmp_path_factory.mktemp("checkpoints")
    first, second = (make_checkpoint(folder / name, "Qwen3ForCausalLM", seed=ord(name)) for name in "ab")
    return first, second


@pytest.fixture(scope="module")
def shared_server(checkpoints: tuple[Path, Path]) -> Iterator[Server]:
    with running_server(checkpoints[0], "--max-total-tokens", "262144", "--log-level", "warning") as server:
        yield server


@pytest.fixture
def server(shared_server: Server, checkpoints: tuple[Path, Path]) -> Server:
    """As it was at its start."""
    for path, body in {
        "/abort_weight_update": {},
        "/continue_generation": {},
        "/resume_memory_occupation": {},
        "/update_weights_from_disk": {"model_path": str(checkpoints[0]), "weight_version": "default"},
    }.items():
        shared_server.post(path, body).raise_for_status()
    return shared_server


def run_example(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env=ENVIRONMENT,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_command(command: str, server: Server, checkpoints: tuple[Path, Path], folder: Path) -> str:
    """What a command of the page writes to its standard output."""
    first, second = map(str, checkpoints)
    env = {**os.environ, "URL": str(server.client.base_url).rstrip("/"), "A": first, "B": second}
    done = subprocess.run(["bash", "-euc", command], cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def comparable(value: Any) -> Any:
    """A reply without what varies. Floats are durations and weights: only that they are there is compared."""
    match value:
        case dict():
            return {
                key: type(member).__name__ if VARIES.match(key) else comparable(member)
                for key, member in value.items()
            }
        case list():
            return [comparable(member) for member in value]
        case float():
            return "float"
        case _:
            return value


def test_the_control_plane_answers_as_documented(
    server: Server, checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    documented = COMMAND_AND_REPLY.findall(CONTROL_PLANE.read_text())
    assert len(documented) == CONTROL_PLANE.read_text().count("```sh"), "every command has its reply"
    for command, reply in documented:
        answer = json.loads(run_command(command, server, checkpoints, tmp_path))
        assert comparable(answer) == comparable(json.loads(reply)), command


def test_plain_http(server: Server, checkpoints: tuple[Path, Path]) -> None:
    output = run_example("plain_http.py", str(server.client.base_url), str(checkpoints[1]))
    assert re.search(r"stream: .*'default', 'start': 0, .*'version': '1', .*'end': 200}", output)
    assert "why it waits: kv_cache is released; weights are stale" in output
    assert output.endswith("answered with: [{'version': '2', 'start': 0, 'end': 8}]\n")


def test_an_rl_loop_goes_on_when_answers_are_lost(server: Server, checkpoints: tuple[Path, Path]) -> None:
    arguments = ["--model-path", str(checkpoints[0]), "--steps", "3"]
    disturbed = run_example("rl_step_with_retries.py", *arguments, "--lose-every", "2")
    assert disturbed.count("/transition (the answer was lost)") == disturbed.count("(replayed)") > 0
    url = str(server.client.base_url).rstrip("/")
    undisturbed = run_example("rl_step_with_retries.py", *arguments, "--lose-every", "0", "--url", url)
    assert "no answer" not in undisturbed
    rewards = [re.findall(r"mean reward (\S+)", output) for output in (disturbed, undisturbed)]
    assert rewards[0] == rewards[1]


def test_a_trainer_sends_its_weights_after_each_step() -> None:
    output = run_example("weight_sender.py", "--steps", "2")
    assert re.findall(r"rollouts by weights {'(\d)'}", output) == ["0", "1"]
    assert re.findall(r"as version (\d)", output) == ["1", "2"]


def test_the_page_on_testing_controllers(tmp_path: Path) -> None:
    tests = tmp_path / "test_page.py"
    tests.write_text("\n".join(re.findall(r"```python\n(.*?)```", TESTING.read_text(), re.DOTALL)))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    done = subprocess.run(
        [*command, str(tests)], capture_output=True, text=True, timeout=100, check=False, env=ENVIRONMENT
    )
    assert done.returncode == 0, done.stdout
    assert "5 passed" in done.stdout
