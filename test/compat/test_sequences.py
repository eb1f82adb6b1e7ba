"""The worked sequences of control_semantics section 4 that no one framework runs as a whole: 4 to 7.

1 to 3 are those of verl, slime and miles (test_framework_steps.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fixtures.compat import COMPAT_ENVIRONMENT, run_example
from fixtures.servers import running_server, url_of

# 64 of them are in the contract's sequences.
ENVIRONMENT = {**COMPAT_ENVIRONMENT, "NUM_ROLLOUTS": "8"}
RunExample = Callable[[str], str]


@pytest.fixture(scope="module")
def run_with_server(checkpoints: tuple[Path, Path]) -> Iterator[RunExample]:
    """Run an example against a server that all of them share."""
    options = ("--skip-tokenizer-init", "--max-total-tokens", "32768", "--log-level", "warning")
    context = '{"max_position_embeddings": 1024}'
    with running_server(checkpoints[0], *options, "--json-model-override-args", context) as server:
        # Every fact that the example states, it has checked.
        yield lambda name: run_example(
            name, "--url", url_of(server), "--model-path", str(checkpoints[0]), environment=ENVIRONMENT
        )
        assert server.process.poll() is None, "the server has ended"


def test_4_and_5_rollouts_in_flight(run_with_server: RunExample) -> None:
    output = run_with_server("rollouts_in_flight.py")
    assert output.count("all 8 rollouts have their 400 tokens") == 2
    assert "each has tokens by the weights 0, 1, 2, in this order" in output
    assert "each has tokens by the weights 2, 3, in this order" in output
    assert output.endswith("engine and trainer agree: True\n")


def test_6_a_storm_of_retries(run_with_server: RunExample) -> None:
    output = run_with_server("retry_storm.py")
    assert "in_place and retract: retract is in force" in output
    assert "retract and abort: abort is in force" in output
    assert output.endswith("the same processes run\n  they give the same tokens\n")


def test_7_updates_that_fail(run_with_server: RunExample) -> None:
    output = run_with_server("failing_updates.py")
    assert "expected shape [64, 96], got [63, 96]" in output
    assert "refused with 400: shared memory" in output
    assert output.count("the old weights serve, bit for bit") == 3
    assert output.count("the next update works: Updated ") == 3
