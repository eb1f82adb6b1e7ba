"""The worked sequences of control_semantics section 4 that no one framework runs as a whole: 4 to 7.

1 to 3 are those of verl, slime and miles (test_framework_steps.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import httpx
import pytest
from fixtures.compat import COMPAT_ENVIRONMENT, ROOT, run_example
from fixtures.servers import free_port, wait_until

EXAMPLES = ROOT / "examples"
ENVIRONMENT = {
    **COMPAT_ENVIRONMENT,
    "PYTHONPATH": os.pathsep.join([COMPAT_ENVIRONMENT["PYTHONPATH"], str(EXAMPLES)]),
    # 64 of them are in the contract's sequences.
    "NUM_ROLLOUTS": "8",
}
MAKE_MODEL = "import sys, tiny_rl; tiny_rl.make_tiny_model(tiny_rl.Path(sys.argv[1]))"

RunExample = Callable[[str], str]


@pytest.fixture(scope="module")
def run_with_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunExample]:
    """Run an example against a server of two ranks, which all of them share."""
    model = tmp_path_factory.mktemp("model")
    subprocess.run([sys.executable, "-c", MAKE_MODEL, str(model)], check=True, env=ENVIRONMENT)
    port = free_port()
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--port", str(port)]
    command += ["--tp", "2", "--skip-tokenizer-init", "--max-total-tokens", "32768", "--log-level", "error"]
    server = subprocess.Popen(command, env=ENVIRONMENT)
    url = f"http://127.0.0.1:{port}"

    def is_up() -> bool:
        assert server.poll() is None, "the server did not start"
        try:
            return httpx.get(f"{url}/health").status_code == 200
        except httpx.TransportError:
            return False

    def run(name: str) -> str:
        # Every fact that the example states, it has checked.
        return run_example(name, "--url", url, "--model-path", str(model), environment=ENVIRONMENT)

    try:
        wait_until(is_up, "the server answers", 120)
        yield run
        assert server.poll() is None, "the server has ended"
    finally:
        server.terminate()
        server.wait(60)


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
    assert "refused with 400: rank 1: shared memory" in output
    assert output.count("the old weights serve, bit for bit") == 3
    assert output.count("the next update works: Updated 25 tensors.") == 3
