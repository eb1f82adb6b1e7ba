"""A soak test: control requests at random, against a server whose streams are checked token by token.

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
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from fixtures.checkpoints import make_checkpoint
from fixtures.servers import running_server
from safetensors.torch import load_file, save_file
from soak.storm import MAX_TOTAL_TOKENS, Soak
from soak.tally import Tally, report


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="make soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="length (%(default)s)")
    parser.add_argument("--streams", type=int, default=16, help="clients at a time (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the operations (%(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (%(default)s)")
    parser.add_argument("server_flags", nargs="*", help="further flags of the server, after --")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="eb-") as name:
        folder = Path(name)
        make_models(folder, args.seed)
        tally = Tally()
        flags = ("--skip-tokenizer-init", "--dtype", "float32", "--device", args.device)
        flags += ("--max-total-tokens", str(MAX_TOTAL_TOKENS), "--log-level", "warning", *args.server_flags)
        with running_server(folder / "model", *flags) as server:
            try:
                before, after = asyncio.run(Soak(args, server, folder, tally).run())
            finally:
                print(server.log[-2000:], file=sys.stderr)
    if not report(tally, before, after):
        raise SystemExit(1)


def make_models(folder: Path, seed: int) -> None:
    """What is served (`model`), other weights of its shape (`other`), and some that do not fit (`wrong`)."""
    for number, name in enumerate(("model", "other", "wrong")):
        make_checkpoint(folder / name, "Qwen3ForCausalLM", seed=seed + number, max_position_embeddings=2048)
    file = folder / "wrong" / "model.safetensors"
    save_file({**load_file(file), "model.norm.weight": torch.ones(3)}, file, {"format": "pt"})


if __name__ == "__main__":
    main()
