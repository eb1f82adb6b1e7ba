"""An engine under a storm of control requests, beside streams whose every token is checked.

    python -m ebbtide.testing.soak --minutes 30

A tiny model of random weights is served. Before the storm it answers every prompt greedily, undisturbed: the
twin. Then clients stream those prompts again and again, and some of them hang up in the middle, while memory
is released and resumed, parked and resized, generation paused in every mode, weights updated (to the same
values, under new versions), sessions given up, wrong updates refused, and senders killed in the middle of an
update. In the end there is a table: requests, those that were lost or answered wrongly, and what the engine's
processes hold before the storm, when each operation has been rehearsed, and after it. The exit status
is 1 if a request was lost or wrong, a reply was a failure of the engine, or something leaked.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ebbtide.testing.soak.doors import open_door
from ebbtide.testing.soak.model import make_models
from ebbtide.testing.soak.storm import Soak
from ebbtide.testing.soak.tally import Tally, report


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m ebbtide.testing.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--calm-s", type=float, default=0.3, help="longest pause between two operations")
    parser.add_argument("--rehearsals", type=int, default=2, help="of every operation, before the storm")
    parser.add_argument("--watch-s", type=float, default=0.0, help="a line of how it goes, so often")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--door", choices=("http", "engine"), default="http")
    parser.add_argument("--park", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--resize", action=argparse.BooleanOptionalAction, default=True)
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
