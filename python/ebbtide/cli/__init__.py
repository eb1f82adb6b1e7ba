"""The `ebbtide` command."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command with the arguments after its name; returns the exit status.

    0: done; 1: it failed, or was refused; 2: the command line is wrong; 130: interrupted.
    """
    from ebbtide.cli.commands import app

    try:
        app(args=None if argv is None else list(argv), prog_name="ebbtide")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    return 0
