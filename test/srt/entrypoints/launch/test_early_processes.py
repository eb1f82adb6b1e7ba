"""Ranks that import while the configuration is read: taken by their names, or ended."""

import os

import pytest
from fixtures.servers import environment_of

from ebbtide.srt.entrypoints.launch.child_process import EarlyProcesses
from ebbtide.srt.server_args import ServerArgs


def test_there_is_one_for_every_rank_of_this_node_and_those_not_taken_end() -> None:
    args = ServerArgs(model_path="m", tp_size=2, device="cpu", kernel_cache_dir="/kernels")
    with EarlyProcesses(args) as early:
        assert list(early.pids) == ["scheduler-tp0", "scheduler-tp1"]
        for pid in early.pids.values():
            # Libraries look for their kernels as they are imported.
            assert environment_of(pid)["FLASHINFER_WORKSPACE_BASE"] == "/kernels"
        taken = early.take("scheduler-tp1")
        assert taken is not None
        assert early.take("scheduler-tp1") is None
        assert early.take("scheduler") is None
        [left_pid] = early.pids.values()
        os.kill(left_pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(left_pid, 0)
    os.kill(taken.pid, 0)
    taken.kill()
    taken.close()


@pytest.mark.parametrize(
    "arguments", [{"tp_size": 0}, {"nnodes": 0}, {"memory_saver_backend": "torch_memory_saver"}]
)
def test_arguments_that_are_refused_elsewhere_start_nothing(arguments: dict[str, object]) -> None:
    with EarlyProcesses(ServerArgs(model_path="m", **arguments)) as early:  # type: ignore[arg-type]
        assert early.pids == {}
