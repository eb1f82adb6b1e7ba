"""What every benchmark writes: its results, and what they were measured on."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
PACKAGES = ("ebbtide", "torch", "transformers", "numpy", "msgspec", "pyzmq")


def write_result(name: str, results: dict[str, Any]) -> Path:
    """Write `bench/results/<name>.json`, replacing the last one, and return its path.

    Args:
        results: every run, not only the medians; plain JSON values.
    """
    content = {
        "benchmark": name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "hardware": hardware(),
        "versions": {"python": platform.python_version()}
        | {package: version(package) for package in PACKAGES},
        # What changes how threads work together, and with it every figure on a CPU.
        "environment": {
            name: value
            for name, value in os.environ.items()
            if name.startswith(("OMP_", "GOMP_", "MKL_", "KMP_"))
        },
        "results": results,
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def hardware() -> dict[str, Any]:
    """The machine, and how busy others kept it: figures of a loaded machine are to be read with care."""
    return {
        "cpu": _cpu_model(),
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "load_average_1min": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _git(*arguments: str) -> str:
    run = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return run.stdout.strip()
