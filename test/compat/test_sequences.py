"""The worked sequences of control_semantics section 4 that no one framework runs as a whole: 4 to 7.

1 to 3 are those of verl, slime and miles (test_framework_steps.py).
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fixtures.compat import play_example
from fixtures.servers import Server, url_of


@pytest.fixture(scope="module")
def arguments(server_of_ids: Server, checkpoints: tuple[Path, Path]) -> Iterator[list[str]]:
    """Those of examples, which share a server. Every fact that they state, they have checked."""
    update = {"model_path": str(checkpoints[0]), "weight_version": "0"}
    assert server_of_ids.post("/update_weights_from_disk", update).is_success
    yield ["--url", url_of(server_of_ids), "--model-path", str(checkpoints[0])]
    assert server_of_ids.process.poll() is None, "the server has ended"


def test_4_and_5_rollouts_in_flight(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # 64 of them are in the contract's sequences.
    monkeypatch.setenv("NUM_ROLLOUTS", "8")
    output = play_example("rollouts_in_flight.py", *arguments)
    assert output.count("all 8 rollouts have their 400 tokens") == 2
    assert "each has tokens by the weights 0, 1, 2, in this order" in output
    assert "each has tokens by the weights 2, 3, in this order" in output
    assert output.endswith("engine and trainer agree: True\n")


def test_6_a_storm_of_retries(arguments: list[str]) -> None:
    output = play_example("retry_storm.py", *arguments)
    assert "in_place and retract: retract is in force" in output
    assert "retract and abort: abort is in force" in output
    assert output.endswith("the same processes run\n  they give the same tokens\n")


def test_7_updates_that_fail(arguments: list[str]) -> None:
    output = play_example("failing_updates.py", *arguments)
    assert "expected shape [64, 96], got [63, 96]" in output
    assert "refused with 400: shared memory" in output
    assert output.count("the old weights serve, bit for bit") == 3
    assert output.count("the next update works: Updated ") == 3
