"""How many files a process may hold open."""

import resource


def raise_file_limit() -> None:
    """Raise it to what the system allows.

    Every client of a server, and every block of shared memory of a payload, is a file that is held open.
    What is usual, 1024, is less than the streams of a rollout.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
