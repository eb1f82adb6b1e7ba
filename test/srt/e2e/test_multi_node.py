"""One engine on two nodes: two launchers of this host, which share nothing but addresses."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pytest
from fixtures.gpu_device import DEVICE
from fixtures.layouts import TWO_RANKS, Layout
from fixtures.references import Reference
from fixtures.servers import ENVIRONMENT, Server, free_port, is_alive, running_server, wait_until

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 16, "ignore_eos": True}
PROMPTS = [[3, 1, 4, 1, 5], list(range(40)), [200], [7] * 20]


@dataclass
class SecondNode:
    """`python -m ebbtide.launch_server --node-rank 1` in a process of its own."""

    process: subprocess.Popen[bytes]
    folder: Path

    def children(self) -> dict[str, int]:
        """Process ids by name."""
        found = psutil.Process(self.process.pid).children(recursive=True)
        return {child.cmdline()[-1]: child.pid for child in found}

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()


@contextmanager
def running_nodes(checkpoint: Path, *sizes: str) -> Iterator[tuple[Server, SecondNode]]:
    """Node 1 is there first; ready when node 0 answers."""
    together = [*sizes, "--nnodes", "2", "--dist-init-addr", f"127.0.0.1:{free_port()}"]
    command = [sys.executable, "-m", "ebbtide.launch_server", "--model-path", str(checkpoint)]
    command += ["--max-total-tokens", "4096", *DEVICE.flags, *together, "--node-rank", "1"]
    # On a real second node this would be device 0 again.
    command += ["--base-gpu-id", "1"] if DEVICE.is_cuda else []
    with TemporaryDirectory(prefix="eb-") as folder, open(f"{folder}/log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**ENVIRONMENT, "TMPDIR": folder})
        try:
            with running_server(checkpoint, *together) as server:
                yield server, SecondNode(process, Path(folder))
        finally:
            process.kill()
            process.wait()
            wait_until(lambda: not list(Path(folder).glob("ebbtide-*")), "the ranks have gone")


def assert_serves(server: Server, reference: Reference) -> None:
    body = {"input_ids": PROMPTS, "sampling_params": GREEDY}
    outputs = [output["output_ids"] for output in server.post("/generate", body).json()]
    assert all(map(reference.accepts, PROMPTS, outputs))


# On GPUs each node has one.
@pytest.mark.parametrize("layout", [TWO_RANKS])
def test_a_model_on_two_nodes_serves_and_dies_as_one(
    layout: Layout, checkpoint_a: Path, checkpoint_b: Path, reference_a: Reference, reference_b: Reference
) -> None:
    with running_nodes(checkpoint_a, *layout.flags) as (server, other):
        assert (set(server.children()), set(other.children())) == (
            {"scheduler-tp0", "detokenizer"},
            {"scheduler-tp1"},
        )
        assert_serves(server, reference_a)
        assert server.post("/update_weights_from_disk", {"model_path": str(checkpoint_b)}).is_success
        assert_serves(server, reference_b)
        children = [*server.children().values(), *other.children().values()]
        os.kill(other.children()["scheduler-tp1"], signal.SIGKILL)
        assert server.process.wait() == 1
        assert other.process.wait() == 1
        said = "the scheduler-tp1 process was ended by SIGKILL"
        assert f"\npython -m ebbtide.launch_server: node 1: {said}" in server.log
        assert f"\npython -m ebbtide.launch_server: {said}" in other.log
        assert not any(is_alive(pid) for pid in children)
