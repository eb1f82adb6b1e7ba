"""How many files a process may hold open."""

import resource
from pathlib import Path

# The kernel refuses any limit above this one, also a hard limit from before it was lowered.
SYSTEM_LIMIT = Path("/proc/sys/fs/nr_open")


def raise_file_limit() -> None:
    """Raise it to what the system allows.

    Every client of a server, and every block of shared memory of a payload, is a file that is held open.
    What is usual, 1024, is less than the streams of a rollout.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    system = int(SYSTEM_LIMIT.read_text())
    limit = system if hard == resource.RLIM_INFINITY else min(hard, system)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
