"""Seconds from the start of a server's process to its first token, with kernels compiled and cached before.

One start comes first and fills the caches, Python's own for the modules it imports among them; it is in the
JSON, and does not count. Each start ends with a request of one token. The lines of the log, with the seconds
at which they came, are the phases.

The limit is what no Python engine on this machine goes below: a process that imports torch and transformers
and makes a CUDA context, measured in the same run.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import httpx
from gpu_common import Report, engine_args, model_folder, parse, parser_of, running_server

MODEL = "llama8b"
FLOOR = "import torch, transformers; torch.zeros(1, device='{device}').add_(1).item()"


def start_once(arguments: dict[str, Any]) -> dict[str, Any]:
    """One server until its first token."""
    with running_server(arguments) as server:
        phases: list[tuple[float, str]] = []
        num_seen = 0
        while True:
            now_s = time.perf_counter() - server.started
            lines = server.log.splitlines()
            phases += [(round(now_s, 2), line[:300]) for line in lines[num_seen:]]
            num_seen = len(lines)
            if server.process.poll() is not None:
                raise RuntimeError(f"the server ended: {server.log[-2000:]}")
            if now_s > 400:
                raise RuntimeError(f"not up after {now_s:.0f} s: {server.log[-2000:]}")
            try:
                if httpx.get(server.url + "/health", timeout=5).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.02)
        ready_s = time.perf_counter() - server.started
        body = {"input_ids": list(range(1, 17)), "sampling_params": {"max_new_tokens": 1, "ignore_eos": True}}
        response = httpx.post(server.url + "/generate", json=body, timeout=300)
        response.raise_for_status()
        first_token_s = time.perf_counter() - server.started
        return {"first_token_s": first_token_s, "ready_s": ready_s, "log": phases}


def floor_s(device: str) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", FLOOR.format(device=device)], check=True)
    return time.perf_counter() - started


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--shape", default=MODEL)
    # Where it is set, every start compiles every module.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    args: argparse.Namespace = parse(parser, argv)
    report = Report("gpu_start", args)
    with report.attempt("start.first_token"), model_folder(args, args.shape) as (_, folder):
        sizes = {"max_total_tokens": 4096 if args.tiny else 220_000}
        arguments = engine_args(args, folder, **sizes)
        report.facts["filling_the_caches"] = start_once(arguments)
        runs = [start_once(arguments) for _ in range(args.runs)]
        floors = [floor_s(args.device) for _ in range(2)]
        report.add(
            "start.first_token",
            [run["first_token_s"] for run in runs],
            limit=min(floors),
            limit_basis="a process that imports torch and transformers and makes a context",
            shape=args.shape,
            floor_s=floors,
            all_runs=runs,
        )
        for seconds, line in runs[-1]["log"]:
            print(f"  {seconds:6.2f} s  {line[:110]}")
    report.finish()


if __name__ == "__main__":
    main()
