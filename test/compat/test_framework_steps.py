"""A whole RL step in the order of each framework, by its own import paths: the examples as documented."""

import json
import re

import pytest
from fixtures.compat import play_example


def agreed(output: str) -> str:
    """The output, whose last word was this."""
    # Decoded greedily, token by token: the weights that the trainer ended with are those that serve.
    assert output.endswith("engine and trainer agree: True\n"), output
    return output


def test_verl_in_its_own_process() -> None:
    output = agreed(play_example("rl_step_verl.py", "--steps", "2"))
    assert re.findall(r"then (\d+) tensors, (\w+)", output) == [("25", "valid")] * 2
    # Memory falls and rises, stage by stage, by the tag's size.
    for stages in re.findall(r"stage by stage: (\[.*\])", output):
        at_first, without_kv_cache, asleep, with_weights, at_last = json.loads(stages)
        assert 0 == asleep < with_weights == without_kv_cache < at_first == at_last


def test_slime_colocated() -> None:
    output = agreed(play_example("rl_step_slime.py", "--steps", "1"))
    assert "of rollouts by weights {'0'}" in output
    [(freed, weights, num_buckets, rest)] = re.findall(
        r"slept with (\d+) bytes given back; took (\d+) for the weights, .* in (\d+) buckets, then (\d+)",
        output,
    )
    assert int(freed) == int(weights) + int(rest)
    assert int(num_buckets) > 1


def test_miles_with_rollouts_in_flight() -> None:
    output = agreed(play_example("rl_step_miles.py", "--steps", "1"))
    assert "paused with 8 rollouts retracted" in output
    assert "25 tensors at once: weights 1 serve" in output
    assert "8 rollouts went on: ended by ['length'], weights [('0', '1')]" in output


def test_areal_with_rollouts_interrupted() -> None:
    output = agreed(play_example("rl_step_areal.py", "--steps", "1"))
    assert "8 rollouts were interrupted, all complete: True" in output


def test_a_sharded_trainer_beside_an_engine(capfd: pytest.CaptureFixture[str]) -> None:
    play_example("colocated_fsdp2.py", "--steps", "1")
    output = agreed(capfd.readouterr().out)  # the first of its processes has the engine
    assert re.findall(r"then weights (\d)", output) == ["1"]


def test_plain_python_with_a_rollout_that_goes_on() -> None:
    output = agreed(play_example("plain_python.py", "--steps", "2"))
    assert re.findall(r"then weights (\d)", output) == ["1", "2"]
    spans = re.findall(r"tokens (\d+) to (\d+) by weights (\d)", output)
    assert [version for _, _, version in spans] == ["0", "1", "1", "2"]
    assert [end for _, end, _ in spans[1::2]] == ["900", "900"]
