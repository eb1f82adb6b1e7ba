"""The `ebbtide` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from ebbtide import __version__


def _serve(argv: Sequence[str]) -> int:
    from ebbtide.launch_server import main

    return main(argv, prog="ebbtide serve")


def _demo(argv: Sequence[str]) -> int:
    try:
        from ebbtide.demo.run import main
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        print('ebbtide demo draws with matplotlib: pip install "ebbtide[demo]"', file=sys.stderr)
        return 2
    return main(list(argv))


def _doctor(argv: Sequence[str]) -> int:
    from ebbtide.doctor import main

    return main(argv)


def _warmup(argv: Sequence[str]) -> int:
    from ebbtide.warmup import main

    return main(argv)


# Each imports its part when called, so that the others start quickly and work without it.
COMMANDS: dict[str, tuple[str, Callable[[Sequence[str]], int]]] = {
    "serve": ("serve a model over HTTP; `ebbtide serve --help` lists the arguments", _serve),
    "demo": ("train a small model by reinforcement learning, with Ebbtide for the rollouts", _demo),
    "warmup": ("compile a model's GPU kernels ahead of time", _warmup),
    "doctor": ("say what this machine has and what that means", _doctor),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command with the arguments after its name; returns the exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    listing = "\n".join(f"  {name:8}{what}" for name, (what, _) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="ebbtide",
        description="An inference engine for the rollouts of reinforcement learning.",
        epilog=f"commands:\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ebbtide {__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="{" + ",".join(COMMANDS) + "}")
    # Only the first word is ours: the rest belongs to the command.
    _, run = COMMANDS[parser.parse_args(given[:1]).command]
    return run(given[1:])


if __name__ == "__main__":
    sys.exit(main())
