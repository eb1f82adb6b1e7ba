"""Measures seconds from the start of a server's process to its first token, with cached kernels.

A first start fills the caches, also Python's cache of compiled modules. It is in the JSON, but does not
count. Each start ends with a request of one token. The log's lines with their times show the phases.

The limit is the time of a process that imports torch and transformers and makes a CUDA context, measured in
the same run: no Python engine on this machine can be faster.

`--cold`: each start has an empty folder for kernels, but Python's modules are cached. The last start is
watched until the compilation that runs beside serving is done. The JSON has the times at which each of
FlashInfer's files was compiled.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from gpu_common import Report, Server, engine_args, model_folder, parse, parser_of, running_server

MODEL = "llama8b"
FLOOR = "import torch, transformers; torch.zeros(1, device='{device}').add_(1).item()"
COMPILED_BESIDE = "compiled beside serving"
COMPILED_BESIDE_S = 80.0


class Log:
    """The lines of a server's log, each with the seconds since the start at which it was read."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.lines: list[tuple[float, str]] = []

    def read(self) -> float:
        """Read new lines; returns the seconds since the start. RuntimeError: the server has ended."""
        now_s = time.perf_counter() - self._server.started
        new = self._server.log.splitlines()[len(self.lines) :]
        self.lines += [(round(now_s, 2), line[:300]) for line in new]
        if self._server.process.poll() is not None:
            raise RuntimeError(f"the server ended: {self._server.log[-2000:]}")
        return now_s

    def wait_for(self, text: str, seconds: float) -> float | None:
        """Wait for a line with this text; returns the seconds at which it was read. None: it did not come."""
        end_s = self.read() + seconds
        while self.read() < end_s:
            for at_s, line in self.lines:
                if text in line:
                    return at_s
            time.sleep(0.1)
        return None


def start_once(arguments: dict[str, Any], *, until: str | None = None) -> dict[str, Any]:
    """Run a server until its first token, or until its log has a line with `until`."""
    with running_server(arguments) as server:
        log = Log(server)
        while (now_s := log.read()) < 400:
            try:
                if httpx.get(server.url + "/health", timeout=5).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.02)
        else:
            raise RuntimeError(f"not up after {now_s:.0f} s: {server.log[-2000:]}")
        ready_s = time.perf_counter() - server.started
        first_ms = ask(server)
        first_token_s = time.perf_counter() - server.started
        print(f"  first token after {first_token_s:.2f} s", flush=True)
        result: dict[str, Any] = {"first_token_s": first_token_s, "ready_s": ready_s, "log": log.lines}
        if until is not None:
            result |= {"until_s": log.wait_for(until, COMPILED_BESIDE_S), "request_ms": [first_ms]}
            result["request_ms"] += [ask(server) for _ in range(3)]
        return result


def ask(server: Server) -> float:
    """Send a request for one token; returns its milliseconds."""
    body = {"input_ids": list(range(1, 17)), "sampling_params": {"max_new_tokens": 1, "ignore_eos": True}}
    begun = time.perf_counter()
    response = httpx.post(server.url + "/generate", json=body, timeout=300)
    response.raise_for_status()
    return (time.perf_counter() - begun) * 1e3


def start_cold(arguments: dict[str, Any], *, watched: bool) -> dict[str, Any]:
    """Run a start without compiled kernels."""
    with tempfile.TemporaryDirectory(prefix="eb-kernels-") as folder:
        cold = arguments | {"kernel_cache_dir": folder}
        run = start_once(cold, until=COMPILED_BESIDE if watched else None)
        run["flashinfer"] = compiled_files(Path(folder))
        return run


def compiled_files(folder: Path) -> dict[str, list[tuple[str, float, float]]]:
    """By module, its files, each with the seconds since ninja's start when compilation began and ended."""
    found = {}
    for log in sorted(folder.glob("**/.ninja_log")):
        rows = [line.split("\t") for line in log.read_text().splitlines() if not line.startswith("#")]
        found[log.parent.name] = [
            (Path(row[3]).name, int(row[0]) / 1e3, int(row[1]) / 1e3) for row in rows if len(row) > 3
        ]
    return found


def floor_s(device: str) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", FLOOR.format(device=device)], check=True)
    return time.perf_counter() - started


def measure_cold(report: Report, runs: int, arguments: dict[str, Any]) -> None:
    is_gpu = arguments["device"] == "cuda"
    with report.attempt("start.cold"):
        all_runs = [start_cold(arguments, watched=run == runs - 1 and is_gpu) for run in range(runs)]
        report.add("start.cold", [run["first_token_s"] for run in all_runs], all_runs=all_runs)
        show(all_runs[-1]["log"])


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--shape", default=MODEL)
    parser.add_argument("--tp", type=int, choices=(1, 2, 4), default=1, help="ranks: rows tp2_*, tp4_*")
    parser.add_argument("--cold", action="store_true", help="with no kernel compiled")
    # If it were set, every start would compile all Python modules.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    args: argparse.Namespace = parse(parser, argv)
    report = Report("gpu_start", args)
    with model_folder(args, args.shape) as (_, folder):
        sizes = {"max_total_tokens": 4096 if args.tiny else 220_000}
        arguments = engine_args(args, folder, tp_size=args.tp, **sizes)
        if args.cold:
            measure_cold(report, args.runs, arguments)
        else:
            measure_cached(report, args, arguments)
    report.finish()


def measure_cached(report: Report, args: argparse.Namespace, arguments: dict[str, Any]) -> None:
    ranks = f"tp{args.tp}_" if args.tp > 1 else ""
    model = f"{args.shape}_" if args.shape != MODEL else ""
    key = f"start.{model}{ranks}first_token"
    with report.attempt(key):
        report.facts["filling_the_caches"] = start_once(arguments)
        runs = [start_once(arguments) for _ in range(args.runs)]
        floors = [floor_s(args.device) for _ in range(2)]
        report.add(
            key,
            [run["first_token_s"] for run in runs],
            limit=min(floors),
            limit_basis="a process that imports torch and transformers and makes a context",
            shape=args.shape,
            floor_s=floors,
            all_runs=runs,
        )
        show(runs[-1]["log"])


def show(log: list[tuple[float, str]]) -> None:
    for seconds, line in log:
        print(f"  {seconds:6.2f} s  {line[:150]}")


if __name__ == "__main__":
    main()
