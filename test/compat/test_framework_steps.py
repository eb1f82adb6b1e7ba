"""A whole RL step in the order of each framework, by its own import paths: the examples as documented."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from fixtures.compat import COMPAT_ENVIRONMENT, ROOT


def run_example(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *arguments],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
        env=COMPAT_ENVIRONMENT,
    )
    assert done.returncode == 0, done.stderr
    # Decoded greedily, token by token: the weights that the trainer ended with are those that serve.
    assert done.stdout.endswith("engine and trainer agree: True\n"), done.stdout
    return done.stdout


def test_verl_in_its_own_process() -> None:
    output = run_example("rl_step_verl.py", "--steps", "2")
    assert re.findall(r"then (\d+) tensors, (\w+)", output) == [("25", "valid")] * 2


def test_slime_colocated() -> None:
    output = run_example("rl_step_slime.py", "--steps", "1")
    assert "of rollouts by weights {'0'}" in output


def test_miles_with_rollouts_in_flight() -> None:
    output = run_example("rl_step_miles.py", "--steps", "1")
    assert "8 rollouts went on: ended by ['length'], weights [('0', '1')]" in output


def test_areal_with_rollouts_interrupted() -> None:
    output = run_example("rl_step_areal.py", "--steps", "1")
    assert "8 rollouts were interrupted, all complete: True" in output


@pytest.mark.parametrize("name", ["colocated_fsdp2.py", "plain_python.py"])
def test_ebbtides_own(name: str) -> None:
    output = run_example(name, "--steps", "2")
    assert re.findall(r"then weights (\d)", output) == ["1", "2"]
