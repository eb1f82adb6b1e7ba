"""A soak test: control requests at random, against an engine whose streams are checked token by token.

    make soak SOAK_MINUTES=30

It serves a tiny model with random weights. First the model answers every prompt greedily, undisturbed. Then
clients stream those prompts again and again, and some disconnect in the middle, while memory is released,
resumed, parked and resized, generation paused in every mode, weights updated (to the same values, under new
versions), sessions abandoned, wrong updates refused, senders killed in the middle of an update, and several
of these sent at once. Some clients compare logprobs, too. The table at the end counts requests, lost ones and
wrong ones, and compares what the engine's processes hold after a rehearsal of each operation and at the end.
The exit status is 1 if a request was lost or answered wrongly, the engine failed, or something leaked.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

from soak.doors import open_door
from soak.model import make_models
from soak.storm import Soak
from soak.tally import Tally, report


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="make soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="length (%(default)s)")
    parser.add_argument("--streams", type=int, default=16, help="clients at a time (%(default)s)")
    parser.add_argument(
        "--calm-s", type=float, default=0.3, help="most seconds between two operations (%(default)s)"
    )
    parser.add_argument(
        "--rehearsals", type=int, default=2, help="times each operation is tried first (%(default)s)"
    )
    parser.add_argument("--watch-s", type=float, default=0.0, help="seconds between progress lines (0: none)")
    parser.add_argument("--seed", type=int, default=0, help="of the operations (%(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (%(default)s)")
    parser.add_argument(
        "--door", choices=("http", "engine"), default="http", help="a server, or Engine in this process"
    )
    parser.add_argument(
        "--park", action=argparse.BooleanOptionalAction, default=True, help="park KV at releases"
    )
    parser.add_argument(
        "--resize", action=argparse.BooleanOptionalAction, default=True, help="resize the KV cache"
    )
    parser.add_argument("server_flags", nargs="*", help="further flags of the server, after --")
    args = parser.parse_args(argv)
    if args.server_flags and args.door == "engine":
        parser.error("further flags are a server's, and --door engine starts none")
    with tempfile.TemporaryDirectory(prefix="eb-") as name:
        folder = Path(name)
        make_models(folder, args.seed)
        tally = Tally()
        with open_door(args, folder) as door:
            before, after = asyncio.run(Soak(args, door, folder, tally).run())
    if not report(tally, before, after):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
