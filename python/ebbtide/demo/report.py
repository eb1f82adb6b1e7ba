"""The report: one HTML file with everything inside."""

from __future__ import annotations

import base64
import os
import platform
from collections.abc import Iterable, Sequence
from html import escape
from importlib.metadata import version
from pathlib import Path
from statistics import median

import psutil

from ebbtide.demo import figures
from ebbtide.demo.loop import COLUMNS, MAX_LOGPROB_DIFFERENCE, MB, Results, Stage
from ebbtide.demo.trainer import LARGEST_WEIGHT, Problem

_PACKAGES = ("ebbtide", "torch", "transformers", "msgspec", "pyzmq", "numpy")
_NUM_EXAMPLES = 10
_STYLE = """
:root { color-scheme: light; }
body { margin: 0 auto; padding: 2.5rem 1.5rem 4rem; max-width: 68rem; color: #1b2733; background: #fff;
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { font-size: 1.75rem; margin: 0 0 .4rem; } h2 { font-size: 1.15rem; margin: 2.6rem 0 .5rem; }
p { margin: .4rem 0; max-width: 54rem; color: #45566a; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(18rem, 1fr)); gap: .9rem;
  margin: 1.6rem 0; }
.card { border: 1px solid #e3e8ee; border-radius: .6rem; padding: .9rem 1.1rem; }
.card b { display: block; font-size: 1.45rem; font-weight: 650; }
.card span { color: #66788a; font-size: .85rem; line-height: 1.35; display: block; }
img { width: 100%; height: auto; display: block; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .82rem; font-variant-numeric: tabular-nums;
  white-space: nowrap; }
th, td { padding: .22rem .65rem; text-align: right; border-bottom: 1px solid #e3e8ee; }
th { color: #66788a; font-weight: 600; white-space: normal; vertical-align: bottom; }
tbody tr:hover { background: #f5f8fb; }
.left th, .left td { text-align: left; } .right { color: #16794c; } .wrong { color: #b3372b; }
details summary { cursor: pointer; color: #2563a8; margin: .4rem 0; }
"""


def write_report(folder: Path, results: Results) -> Path:
    """Writes `report.html` and `demo.png`; returns the path of the first. Needs at least one step."""
    figures.write_picture(folder / "demo.png", results)
    path = folder / "report.html"
    path.write_text(_page(results), encoding="utf-8")
    return path


def _page(results: Results) -> str:
    sections = (
        _introduction(results),
        _cards(results),
        _reward(results),
        _memory(results),
        _elastic(results),
        _logprobs(results),
        _steps(results),
        _environment(results),
    )
    title = "Ebbtide demo: a model learns addition"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>\n'
        f"<body><h1>{title}</h1>\n" + "\n".join(sections) + "\n</body></html>\n"
    )


def _introduction(results: Results) -> str:
    failed = f'<p class="wrong"><b>Failed: {escape(results.failure)}</b></p>' if results.failure else ""
    fp8 = (
        "<p><b>The engine's weights and KV cache are in FP8 (e4m3), emulated on this CPU:</b> the numbers "
        "are rounded as on a GPU, without its speed. The trainer's are in float32, and it sends them as they "
        "are.</p>"
        if results.is_fp8
        else ""
    )
    return failed + (
        "<p>A small Qwen3 model learns to add two-digit numbers by GRPO. In every step the engine generates "
        "answers, gives all of its memory back while the trainer works, takes memory for the weights again, "
        "receives the new ones in flattened buckets, and takes memory for the KV cache again.</p>"
        "<p>Answers have the ones digit first, as in adding by hand: the right answer to 37+58= is 59, for "
        "95. Only an answer that is right to the last digit is rewarded. Before the first step the model was "
        "warmed up on sums with their answers, until about one sampled answer in six was right.</p>" + fp8
    )


def _cards(results: Results) -> str:
    tag_bytes, process_bytes = (
        median(values) for values in zip(*map(results.released, results.steps), strict=True)
    )
    stall = [Stage.RELEASE, Stage.RESUME_WEIGHTS, Stage.UPDATE, Stage.RESUME_KV]
    overhead_ms = median(sum(step.stages[stage].seconds for stage in stall) for step in results.steps) * 1e3
    accuracy = f"{results.before.accuracy:.0%} → " + (
        f"{results.after.accuracy:.0%}" if results.after else "?"
    )
    cards = [
        (f"{results.first_reward:.2f} → {results.last_reward:.2f}", "reward: sampled answers that are right"),
        (accuracy, f"of {len(results.before.answers)} held-out sums, answered greedily"),
        (
            f"{process_bytes / MB:.0f} of {tag_bytes / MB:.0f} MB",
            "given back in each step: by the count of the operating system, of what the engine reports",
        ),
        (f"{overhead_ms:.0f} ms", "per step to release, resume weights, update and resume the KV cache"),
        (
            f"{results.greatest_logprob_difference:.1e}",
            "greatest difference of a logprob, trainer and engine"
            + ("" if results.is_fp8 else f" (limit {MAX_LOGPROB_DIFFERENCE:.0e})"),
        ),
        (f"{results.total_s:.0f} s", f"in all, {results.warm_up_s:.0f} s of it warm-up; seed {results.seed}"),
    ]
    return (
        '<div class="cards">'
        + "".join(
            f'<div class="card"><b>{escape(value)}</b><span>{escape(what)}</span></div>'
            for value, what in cards
        )
        + "</div>"
    )


def _reward(results: Results) -> str:
    plot = _image(figures.svg(figures.reward, results, 10, 3.6), "reward by step")
    if results.after is None:
        return f"<h2>Learning</h2>{plot}"
    rows = [
        (escape(problem.question), _answer(problem, before), _answer(problem, after))
        for (problem, before), (_, after) in zip(results.before.answers, results.after.answers, strict=True)
    ][:_NUM_EXAMPLES]
    examples = _table(("held-out sum", "before", "after"), rows, "left")
    summary = "<summary>Some greedy answers to held-out sums</summary>"
    return f"<h2>Learning</h2>{plot}<details>{summary}{examples}</details>"


def _memory(results: Results) -> str:
    return (
        "<h2>Memory</h2><p>Weights and KV cache: resident bytes as the engine reports them. The processes: "
        "proportional set size (Pss) of all of the engine's processes, as the operating system counts it; "
        "what remains while everything is released is interpreters, libraries and their working memory.</p>"
        + _image(figures.svg(figures.memory_by_stage, results, 10, 5), "resident memory by stage of a step")
        + _image(figures.svg(figures.memory_over_time, results, 10, 3.6), "resident memory over time")
    )


def _elastic(results: Results) -> str:
    if results.elastic is None:
        return ""
    plot = figures.svg(figures.memory_under_requests, results, 10, 3.8)
    return (
        "<h2>Lending memory while requests run</h2><p>At the end the trained model answers "
        f"{results.elastic.num_requests} questions at length, while a trainer takes seven eighths of the "
        "KV cache for a while, and then all of it. Requests that have no room are parked: their KV waits in "
        "host memory, and they go on from there. All answers are token for token those of an undisturbed "
        "engine.</p>" + _image(plot, "resident memory while requests run")
    )


def _logprobs(results: Results) -> str:
    if results.is_fp8:
        kl = median(step.ratios.divergence for step in results.steps)
        share = max(step.ratios.truncated for step in results.steps)
        return (
            "<h2>Trainer and engine differ</h2><p>Before it learns, the trainer computes the "
            "log-probability of every token that the engine sampled, in float32 and by the weights that it "
            "had sent. The importance ratio is its probability by the engine's. In the loss each token "
            f"weighs as much as its ratio, but no more than {LARGEST_WEIGHT:g}, so that the trainer learns "
            f"what it would from rollouts of its own. Per token the engine is {kl:.1e} nats away (median of "
            f"the steps); at most {share:.2%} of a step's tokens are truncated.</p>"
            + _image(figures.svg(figures.importance_ratios, results, 10, 3.6), "importance ratios by step")
        )
    return (
        "<h2>Trainer and engine agree</h2><p>Before it learns, the trainer computes the log-probability of "
        "every token that the engine sampled, with the same weights, in float32.</p>"
        + _image(figures.svg(figures.logprob_difference, results, 10, 3.2), "logprob difference by step")
    )


def _steps(results: Results) -> str:
    rows = [[escape(cell(step)) for _, _, cell in COLUMNS] for step in results.steps]
    return (
        "<h2>Steps</h2><p>MB (10⁶ bytes): while the engine generates → while the trainer trains.</p>"
        f'<div class="scroll">{_table([name for name, _, _ in COLUMNS], rows, "")}</div>'
    )


def _environment(results: Results) -> str:
    rows = [
        ("processor", f"{_processor()}, {len(os.sched_getaffinity(0))} cores"),
        ("memory", f"{psutil.virtual_memory().total / 1e9:.1f} GB"),
        ("system", f"{platform.system()} {platform.release()} {platform.machine()}"),
        ("load when the report was written", f"{os.getloadavg()[0]:.1f}"),
        ("Python", platform.python_version()),
        *((package, version(package)) for package in _PACKAGES),
    ]
    return "<h2>Measured on</h2>" + _table(
        (), [(escape(what), escape(value)) for what, value in rows], "left"
    )


def _answer(problem: Problem, answer: str) -> str:
    return f'<span class="{"right" if answer == problem.answer else "wrong"}">{escape(answer)}</span>'


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]], style: str) -> str:
    """Cells are HTML."""
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>\n" for row in rows)
    return f'<table class="{style}"><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table>'


def _image(svg: bytes, description: str) -> str:
    data = base64.b64encode(svg).decode()
    return f'<img alt="{escape(description)}" src="data:image/svg+xml;base64,{data}">'


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
