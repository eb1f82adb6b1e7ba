"""Helpers that trainers import: serialized tensors, process trees, ports. torch is imported on use."""

from __future__ import annotations

import base64
import logging
import os
import resource
import socket
import sys
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import psutil

logger = logging.getLogger(__name__)

# NeMo-RL's worker searches this file for its entries in SGLang's allowlist, and would add them if missing:
# "nemo_rl.models.generation.sglang.utils.train_utils."
# "nemo_rl.models.policy.torch_reductions_utils."
# The list that counts is in ebbtide.formats.allowed_globals.

MAX_OPEN_FILES = 65535
# Nothing is sent there: connecting a datagram socket only chooses the local address of the route.
_OUTSIDE = "8.8.8.8"
_POLL_S = 0.01


class MultiprocessingSerializer:
    """Pickles objects so that their tensors are references to memory. Source: wire_api section 4."""

    @staticmethod
    def serialize(obj: Any, output_str: bool = False) -> Any:
        """Pickle an object; keep its tensors alive until the update is answered.

        Args:
            output_str: whether to return base64 text instead of bytes.
        """
        from ebbtide.trainer.payload_encoding import serialize

        data = serialize(obj)
        return base64.b64encode(data).decode("ascii") if output_str else data

    @staticmethod
    def deserialize(data: bytes | str) -> Any:
        """Deserialize an object, without importing or calling what the data names.

        CPU tensors are copied; CUDA tensors are views of the sender's memory.

        Raises:
            RequestRejected: `serialize` did not make it, or the sender's memory cannot be opened.
        """
        from sglang._opened import deserialize

        return deserialize(data)


def kill_process_tree(
    pid: int | None, include_parent: bool = True, skip_pid: int | None = None, wait_timeout: float = 60
) -> None:
    """Kill a process and all its descendants, and wait until they have ended.

    This process itself is never killed: if `pid` is its id, it ends by `sys.exit(0)` at last.

    Args:
        pid: None: only the descendants of this process.
        include_parent: whether to kill `pid` itself.
        skip_pid: id of a process to leave alone.
        wait_timeout: the longest wait, in seconds.
    """
    own_pid = os.getpid()
    include_parent = include_parent and pid is not None
    try:
        parent = psutil.Process(own_pid if pid is None else pid)
        doomed = parent.children(recursive=True)
    except psutil.NoSuchProcess:
        return
    if include_parent and parent.pid != own_pid:
        doomed.append(parent)
    doomed = [process for process in doomed if process.pid not in (skip_pid, own_pid)]
    for process in doomed:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    deadline_s = time.monotonic() + wait_timeout
    # Not psutil's `wait`: it would take a child's exit status from the code that started the child.
    while (alive := [process for process in doomed if _runs(process)]) and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
    if alive:
        logger.warning("still there %s s after they were killed: %s", wait_timeout, alive)
    if include_parent and parent.pid == own_pid and skip_pid != own_pid:
        sys.exit(0)


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def is_cuda() -> bool:
    """Whether there is a CUDA device."""
    return _has_gpu() and not is_hip()


def is_hip() -> bool:
    """Whether torch was built for ROCm."""
    import torch

    return torch.version.hip is not None


def _has_gpu() -> bool:
    import torch

    device = torch.accelerator.current_accelerator(check_available=True)
    return device is not None and device.type == "cuda"


def get_device(device_id: int | None = None) -> str:
    """`cuda`, or `cuda:<device_id>` if given, if torch sees a GPU; else `cpu`."""
    if not _has_gpu():
        return "cpu"
    return "cuda" if device_id is None else f"cuda:{device_id}"


def init_custom_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Any = None,
    group_name: str = "",
    pg_options: Any = None,
    device_id: Any = None,
) -> Any:
    """Make a process group beside torch's default one; members meet by the group's name.

    An engine's ranks join it by `init_weights_update_group` with the same name. Source: wire_api section 3.3.

    Args:
        init_method: a URL such as `tcp://host:port`; None: `env://`, or `store`.
        store: to meet through, given instead of `init_method`.

    Raises:
        ValueError: `init_method` and `store` are both given, or `store` without `world_size` and `rank`.
    """
    from torch.distributed import distributed_c10d

    c10d: Any = distributed_c10d  # not all of it is exported

    if store is not None and init_method is not None:
        raise ValueError("give init_method or store, not both")
    timeout = timeout if timeout is not None else c10d.default_pg_timeout
    if store is None:
        url = init_method if init_method is not None else "env://"
        store, rank, world_size = next(c10d.rendezvous(url, rank, world_size, timeout=timeout))
        store.set_timeout(timeout)
        store = c10d.PrefixStore(group_name, store)
    elif world_size <= 0 or rank < 0:
        raise ValueError(
            f"a store needs world_size, at least 1, and rank, at least 0: got {world_size} and {rank}"
        )
    group, _ = c10d._new_process_group_helper(
        world_size,
        rank,
        [],
        c10d.Backend(backend if backend is not None else "undefined"),
        store,
        group_name=group_name,
        backend_options=pg_options,
        timeout=timeout,
        device_id=device_id,
    )
    # Register the group's own ranks. Otherwise torch would use those of the default group, or find none.
    c10d._world.pg_group_ranks[group] = {member: member for member in range(world_size)}
    return group


def get_ip() -> str:
    """The address by which other machines reach this one; 127.0.0.1 without a network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((_OUTSIDE, 80))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def get_open_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def set_ulimit(target_soft_limit: int = MAX_OPEN_FILES) -> None:
    """Raise the limit of open files, as far as the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = target_soft_limit if hard == resource.RLIM_INFINITY else min(target_soft_limit, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def assert_pkg_version(*args: Any, **kwargs: Any) -> None:
    """Does nothing: SGLang's version requirements do not apply to Ebbtide."""


def set_prometheus_multiproc_dir() -> None:
    """Does nothing: metrics are collected in one process."""


def add_prometheus_middleware(app: Any) -> None:
    """Does nothing: `/metrics` is a route of `app` already."""


def maybe_set_triton_cache_manager() -> None:
    """Nothing to do."""


def suppress_noisy_warnings() -> None:
    """Nothing to do."""
