"""Fills the tables of docs/performance.md and of the README from bench/results/gpu_*.json.

`--check` only says if they differ.

A table is between `<!-- table NAME -->` and `<!-- end -->`; the rest of the page is not changed. If two files
of the same kind of GPU have a row with the same key, the later one counts. Rows of a GPU other than the usual
one have its name. Rows that no file has are "not measured".
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from common import RESULTS, ROOT
from gpu_goals import GOALS, TABLES, Goal

PAGES = (ROOT / "docs" / "performance.md", ROOT / "README.md")
BLOCK = re.compile(r"(<!-- table (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
NOT_MEASURED = "not measured"
HEAD = ("", "Ebbtide", "goal", "limit here", "of the limit", "SGLang", "vLLM")
HEADLINE_HEAD = ("", "Ebbtide", "of the limit", "SGLang 0.5.14", "vLLM 0.25.0")
HEADLINE = {
    "throughput.llama8b.1": "batch 1",
    "throughput.llama8b.256": "batch 256, prefill included",
    "default.stall_in_place_64": "update all weights while 64 streams decode: longest gap between tokens",
    "default.reply_in_place_256": "the same while 256 streams decode: request to reply",
    "default.stall_retract_256": "the same, their KV computed again: longest gap between tokens",
    "backup.resume": "resume 16 GB of weights from host memory",
    "release.kv_cache": "release 64 GiB of KV cache",
    "resume.kv_cache": "resume 64 GiB of KV cache, on clean pages",
}

# The GPU of most rows, and of other engines' figures.
USUAL_CARD = "H200"

Row = dict[str, Any]


def load(folder: Path) -> tuple[dict[str, Row], list[dict[str, Any]]]:
    """Load the rows by key, with "@CARD" appended for another GPU than the usual; and files, oldest first."""
    files = [json.loads(path.read_text()) for path in folder.glob("gpu_*.json")]
    # Some benchmarks have tables of their own.
    files = [file for file in files if isinstance(file["results"].get("rows"), dict)]
    files = sorted(files, key=lambda file: file["date"])
    rows: dict[str, Row] = {}
    for file in files:
        card = _card(file)
        for name, row in file["results"]["rows"].items():
            key = name if card == USUAL_CARD else f"{name}@{card}"
            # A later run that failed does not replace an earlier measurement.
            if key not in rows or "value" in row:
                rows[key] = row
    return rows, files


def _card(file: dict[str, Any]) -> str:
    """The GPU's short name, such as "H100" for "NVIDIA H100 80GB HBM3"; without GPUs the usual one."""
    gpus = file["hardware"].get("gpus")
    return gpus[0]["name"].removeprefix("NVIDIA ").partition(" ")[0] if gpus else USUAL_CARD


def filled(page: str, folder: Path) -> str:
    """The page, with its tables filled from the results in a folder."""
    rows, files = load(folder)

    def block(match: re.Match[str]) -> str:
        name = match.group(2)
        if name == "headline":
            lines = headline(rows)
        else:
            lines = sources(files) if name == "sources" else table(name, rows)
        return match.group(1) + "\n".join(lines) + "\n" + match.group(3)

    return BLOCK.sub(block, page)


def table(name: str, rows: dict[str, Row]) -> list[str]:
    if name not in TABLES:
        raise SystemExit(f"there is no table {name!r}, only {', '.join(TABLES)}, headline and sources")
    cards: dict[str, list[str]] = {}
    for full in rows:
        key, _, card = full.partition("@")
        cards.setdefault(key, []).append(card)
    lines = [_line(HEAD), _line(["---"] * len(HEAD))]
    bases: list[str] = []
    for key, goal in GOALS.items():
        if goal.table != name:
            continue
        # Rows that were never measured are listed only if they have a goal.
        for card in sorted(cards.get(key, [""] if goal.goal is not None else [])):
            cells = _cells(goal, rows.get(f"{key}@{card}" if card else key, {}), bases)
            if card:
                cells = [f"{cells[0]} ({card})", *cells[1:-2], "", ""]
            lines.append(_line(cells))
    notes = [f"{_mark(number)} {basis}." for number, basis in enumerate(bases)]
    return [*lines, *([""] if notes else []), *(f"{note}  " for note in notes)]


def headline(rows: dict[str, Row]) -> list[str]:
    """The table of the few rows that the README shows."""
    lines = [_line(HEADLINE_HEAD), _line(["---"] * len(HEADLINE_HEAD))]
    for key, title in HEADLINE.items():
        goal, row = GOALS[key], rows.get(key, {})
        _, value, _, _, fraction, *others = _cells(goal, row, [])
        behind = " (behind)" if "value" in row and _is_behind(goal, row["value"]) else ""
        lines.append(_line([title, value.partition(" (")[0].strip("*") + behind, fraction, *others]))
    return lines


def _is_behind(goal: Goal, value: float) -> bool:
    """Whether the best figure of another engine is better."""
    texts = [text.split("(")[0].replace(",", "") for text in (goal.sglang, goal.vllm)]
    others = [float(found) for text in texts for found in re.findall(r"[\d.]+", text)]
    return any(other > value if goal.at_least else other < value for other in others)


def _cells(goal: Goal, row: Row, bases: list[str]) -> list[str]:
    others = [text.replace("-", "\N{EN DASH}") for text in (goal.sglang, goal.vllm)]
    wanted = row.get("goal", goal.goal)
    sign = "≥" if goal.at_least else "≤"
    goal_cell = f"{sign} {number(wanted)}" if wanted is not None else ""
    if "value" not in row:
        reason = f"failed: {row['error']}"[:60] if "error" in row else row.get("skipped", NOT_MEASURED)
        return [goal.title, reason.replace("|", "/"), goal_cell, "", "", *others]
    limit = fraction = ""
    if row["limit"] is not None:
        if row["limit_basis"] not in bases:
            bases.append(row["limit_basis"])
        limit = f"{number(row['limit'])} {_mark(bases.index(row['limit_basis']))}"
    if row["fraction_of_limit"] is not None:
        fraction = f"{row['fraction_of_limit']:.0%}"
    value = f"{number(row['value'])} {goal.unit}"
    # Bold: the goal is reached.
    value = f"**{value}**" if row["reached"] else value
    if "runs" in row:
        value += f" ({_runs(row['runs'])})"
    return [goal.title, value, goal_cell, limit, fraction, *others]


def _runs(runs: Sequence[float]) -> str:
    """Minimum, maximum and number of the runs."""
    if len(runs) == 1:
        return "1 run"
    return f"{number(min(runs))}\N{EN DASH}{number(max(runs))}, {len(runs)} runs"


def sources(files: Iterable[dict[str, Any]]) -> list[str]:
    """A table of the hardware and versions of each file."""
    head = ("file", "date", "commit", "GPU", "driver, CUDA", "versions")
    lines = [_line(head), _line(["---"] * len(head))]
    for file in files:
        hardware, versions = file["hardware"], file["versions"]
        gpus = hardware.get("gpus", [])
        counts = Counter(f"{gpu['name']} {gpu['memory']}" for gpu in gpus)
        names = ", ".join(
            name if count == 1 else f"{count} \N{MULTIPLICATION SIGN} {name}"
            for name, count in counts.items()
        )
        drivers = ", ".join(sorted({gpu["driver"] for gpu in gpus}))
        wanted = ("python", "torch", "flashinfer-python", "triton", "transformers")
        shown = ", ".join(f"{name} {versions[name]}" for name in wanted if name in versions)
        commit = (file["commit"] or "unknown")[:10] + (" + changes" if file["uncommitted_changes"] else "")
        cells = [file["benchmark"], file["date"][:10], commit, names, f"{drivers}, {hardware.get('cuda')}"]
        lines.append(_line([*cells, shown]))
    return lines if len(lines) > 2 else [NOT_MEASURED]


def number(value: float) -> str:
    """A number with three significant digits, or with all digits before the decimal point."""
    size = abs(value)
    if size >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 10 else f"{value:.2f}" if size >= 1 else f"{value:.3g}"


def _mark(index: int) -> str:
    return f"({'abcdefghij'[index]})"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, nargs="+", default=PAGES)
    args = parser.parse_args(argv)
    for page in args.page:
        before = page.read_text()
        after = filled(before, args.results)
        if args.check and before != after:
            sys.exit(f"{page} is not what the results say: run bench/performance_page.py")
        if before != after:
            page.write_text(after)


if __name__ == "__main__":
    main()
