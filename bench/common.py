"""Writes a benchmark's results, with the hardware, the commit and the versions of packages."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

import ebbtide

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
PACKAGES = ("torch", "transformers", "numpy", "msgspec", "pyzmq")
# Listed if they are installed.
GPU_PACKAGES = ("flashinfer-python", "triton", "cuda-bindings", "torch_memory_saver", "nvidia-ml-py")


def write_result(name: str, results: dict[str, Any]) -> Path:
    """Write `bench/results/<name>.json`, replacing an older one; returns its path.

    The environment may set another folder (`EBBTIDE_BENCH_RESULTS`), and the commit of a copy without a git
    repository (`EBBTIDE_BENCH_COMMIT`).

    Args:
        results: all runs, not only medians, as JSON values.
    """
    content = {
        "benchmark": name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **_commit(),
        "hardware": hardware(),
        "versions": {"python": platform.python_version(), "ebbtide": ebbtide.__version__}
        | {package: version(package) for package in PACKAGES}
        | _installed(GPU_PACKAGES),
        # Settings of thread libraries, which change all figures on a CPU.
        "environment": {
            name: value
            for name, value in os.environ.items()
            if name.startswith(("OMP_", "GOMP_", "MKL_", "KMP_"))
        },
        "results": results,
    }
    folder = Path(os.environ.get("EBBTIDE_BENCH_RESULTS") or RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(by_rows(content) + "\n")
    return path


def by_rows(content: dict[str, Any]) -> str:
    """Format JSON with one line for each row of results, and for each other field."""
    lines = []
    for key, value in content.items():
        text = json.dumps(value)
        if key == "results":
            text = _lines(value, 1)
        lines.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}"


def _lines(value: Any, depth: int) -> str:
    if depth == 3 or not isinstance(value, dict | list) or not value:
        return json.dumps(value)
    inside = " " * (depth + 1)
    if isinstance(value, dict):
        lines = [f"{inside}{json.dumps(key)}: {_lines(one, depth + 1)}" for key, one in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{' ' * depth}}}"
    return "[\n" + ",\n".join(inside + _lines(one, depth + 1) for one in value) + f"\n{' ' * depth}]"


def hardware() -> dict[str, Any]:
    """The machine, and its load by other programs, with which figures are less reliable."""
    return {
        "cpu": _cpu_model(),
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "load_average_1min": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        **_gpus(),
    }


def _gpus() -> dict[str, Any]:
    """The GPUs, their driver, and torch's CUDA version; empty without GPUs."""
    if shutil.which("nvidia-smi") is None:
        return {}
    fields = "name,memory.total,driver_version"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    rows = [[part.strip() for part in line.split(",")] for line in run.stdout.splitlines()]
    if run.returncode != 0 or not all(len(row) == 3 for row in rows):
        return {}
    from torch import version as torch_version

    return {
        "gpus": [dict(zip(("name", "memory", "driver"), row, strict=True)) for row in rows],
        "cuda": torch_version.cuda,
    }


def _installed(packages: tuple[str, ...]) -> dict[str, str]:
    versions = {}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _commit() -> dict[str, Any]:
    """The commit, and whether files differ from it; null: unknown."""
    commit = _git("rev-parse", "HEAD")
    if (given := os.environ.get("EBBTIDE_BENCH_COMMIT")) is not None or not commit:
        return {"commit": given, "uncommitted_changes": None}
    changes = _git("status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "uncommitted_changes": bool(changes)}


def _git(*arguments: str) -> str:
    run = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return run.stdout.strip()
