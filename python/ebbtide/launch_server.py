"""`python -m ebbtide.launch_server --model-path ...`: serve a model over HTTP until stopped.

On the further nodes of an engine (`--node-rank 1`) it lends their ranks to node 0, which serves.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from ebbtide.srt.entrypoints.launch.child_process import EarlyProcesses
from ebbtide.srt.entrypoints.launch.console import Stopped, raising_signals
from ebbtide.srt.errors import ConfigurationError, EbbtideError
from ebbtide.srt.server_args import ServeParser
from ebbtide.srt.this_process import torch_hidden


def main(argv: Sequence[str] | None = None, prog: str = "python -m ebbtide.launch_server") -> int:
    """Serve, and return the exit status.

    0: stopped as asked; 1: the engine failed; 2: it cannot start so; 130: stopped before it served.
    """
    parser = ServeParser(
        prog=prog,
        # There are more than a hundred arguments: listed in full, they bury the message of an error.
        usage="%(prog)s MODEL [arguments; --help lists them]",
        description="Serve a model over HTTP.",
    )
    args = parser.read(sys.argv[1:] if argv is None else argv)
    open_standard_streams()
    try:
        with raising_signals(), EarlyProcesses(args) as early:
            # Seconds of imports: not for a usage error, and beside those of the ranks.
            with torch_hidden(args.trust_remote_code):
                import transformers  # noqa: F401
            from ebbtide.srt.entrypoints.http_server import launch_server

            launch_server(args, early)
    except Stopped:
        print(f"{prog}: interrupted before it served", file=sys.stderr)
        return 130
    except EbbtideError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigurationError) else 1
    return 0


def open_standard_streams() -> None:
    """Open those that this process was started without, as daemons are, for it and what it starts.

    What is opened next would get their numbers, and what is written to them.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


if __name__ == "__main__":
    sys.exit(main())
