"""The demo's report: a picture of all plots, and an HTML file that contains it."""

from __future__ import annotations

import base64
import os
from collections.abc import Sequence
from html import escape
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, FigureBase
from matplotlib.ticker import NullFormatter

from ebbtide.demo.loop import (
    COLUMNS,
    FIRST_REWARD_BELOW,
    LAST_REWARD_ABOVE,
    MAX_LOGPROB_DIFFERENCE,
    MB,
    ElasticRecord,
    MemorySample,
    Results,
    Stage,
    StepRecord,
)
from ebbtide.demo.trainer import LARGEST_WEIGHT

_INK, _FAINT, _GRID = "#1b2733", "#66788a", "#e3e8ee"
_BLUE, _TEAL, _AMBER = "#2563a8", "#3aa6a0", "#d9822b"
_PLOT_STYLE: Any = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.5,
    "text.color": _INK,
    "axes.labelcolor": _FAINT,
    "axes.edgecolor": _GRID,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "xtick.color": _FAINT,
    "ytick.color": _FAINT,
    "legend.frameon": False,
    "figure.facecolor": "white",
}


def reward(figure: FigureBase, results: Results) -> None:
    """Plot the mean reward by step."""
    axes = figure.subplots()
    axes.set_title("Reward by step")
    steps, rewards = [step.step for step in results.steps], [step.reward for step in results.steps]
    for level in (FIRST_REWARD_BELOW, LAST_REWARD_ABOVE):
        axes.axhline(level, color=_FAINT, linewidth=0.8, linestyle=(0, (4, 4)))
    axes.plot(steps, rewards, color=_BLUE, linewidth=2)
    axes.fill_between(steps, rewards, color=_BLUE, alpha=0.08, linewidth=0)
    for index, offset, side in ((0, (4, -14), "left"), (-1, (0, 9), "right")):
        end = (steps[index], rewards[index])
        axes.plot(*end, "o", color=_BLUE, markersize=6)
        axes.annotate(f"{end[1]:.2f}", end, offset, textcoords="offset points", ha=side, weight="bold")
    axes.set(xlabel="step", ylabel="share of right answers", ylim=(0, 1.08), xlim=_step_limits(results))


def logprob_difference(figure: FigureBase, results: Results) -> None:
    """Plot the greatest logprob difference between trainer and engine by step."""
    axes = figure.subplots()
    axes.set_title("Trainer and engine: logprobs of the same tokens")
    steps = [step.step for step in results.steps]
    axes.semilogy(steps, [step.logprob_difference for step in results.steps], "o", color=_BLUE, markersize=4)
    axes.axhline(MAX_LOGPROB_DIFFERENCE, color=_AMBER, linewidth=1.4)
    axes.annotate(
        "limit", (0, MAX_LOGPROB_DIFFERENCE), (2, 4), textcoords="offset points", color=_AMBER, weight="bold"
    )
    axes.set(xlabel="step", ylabel="greatest difference", ylim=(1e-7, 5e-4), xlim=_step_limits(results))


def importance_ratios(figure: FigureBase, results: Results) -> None:
    """Plot the importance ratios between trainer and engine by step, for an engine in FP8."""
    axes = figure.subplots()
    axes.set_title("Importance ratios: trainer by engine in FP8 (emulated)")
    steps, ratios = [step.step for step in results.steps], [step.ratios for step in results.steps]
    low, high = [each.low for each in ratios], [each.high for each in ratios]
    axes.fill_between(steps, low, high, color=_BLUE, alpha=0.18, linewidth=0, label="1st to 99th percentile")
    axes.plot(steps, [each.mean for each in ratios], color=_BLUE, linewidth=1.8, label="mean")
    axes.plot(steps, [each.largest for each in ratios], ".", color=_AMBER, markersize=5, label="largest")
    axes.axhline(LARGEST_WEIGHT, color=_AMBER, linewidth=1.2, linestyle=(0, (4, 4)), label="truncated here")
    axes.set(xlabel="step", ylabel="ratio", yscale="log", xlim=_step_limits(results))
    # Room for the legend.
    axes.set_ylim(top=2.5 * max(LARGEST_WEIGHT, *(each.largest for each in ratios)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.legend(loc="upper right", ncols=2, fontsize=8)


def memory_by_stage(figure: FigureBase, results: Results) -> None:
    """Plot memory in the stages of the last two steps. All stages are equally wide."""
    shown = results.steps[-2:]
    samples = [results.start, *_after_each_stage(results.steps)][-len(shown) * len(Stage) - 1 :]
    rows = figure.subplots(3, sharex=True, height_ratios=(1.5, 1, 1))
    rows[0].set_title(
        "Resident memory, stage by stage: two steps, with the median time of each stage", pad=34
    )
    for axes, (name, color, values) in zip(rows, _memory_series(samples), strict=True):
        axes.fill_between(range(len(values)), values, color=color, alpha=0.18, linewidth=0)
        axes.plot(values, color=color, linewidth=1.8, marker="o", markersize=3)
        axes.set(ylim=(0, max(values) * 1.12), ylabel="MB", xticks=[])
        axes.text(0.008, 0.08, name, transform=axes.transAxes, color=color, weight="bold")
        for index in range(1, len(values), 2):
            axes.axvspan(index - 1, index, color=_GRID, alpha=0.45, linewidth=0, zorder=0)
    for index, stage in enumerate([*Stage] * len(shown)):
        time_ms = median(step.stages[stage].seconds for step in results.steps) * 1e3
        _write_above(rows[0], index + 0.5, f"{stage.replace(' ', chr(10))}\n{time_ms:,.0f} ms", 7.5)
    rows[-1].set_xlim(0, len(shown) * len(Stage))


def memory_under_requests(figure: FigureBase, elastic: ElasticRecord) -> None:
    """Plot memory while requests run, with the intervals in which some of it was lent."""
    axes = figure.subplots()
    axes.set_title("Resident memory while requests run: a smaller KV cache, and none at all", pad=34)
    samples = elastic.samples
    start_s = samples[0].time_s
    times_s = [sample.time_s - start_s for sample in samples]
    series = [*_memory_series(samples), ("parked KV", _BLUE, [s.parked_bytes / MB for s in samples])]
    for name, color, values in series:
        axes.plot(times_s, values, color=color, linewidth=1.8, label=name)
        if name != series[0][0]:
            axes.fill_between(times_s, values, color=color, alpha=0.15, linewidth=0)
    for span in elastic.spans:
        axes.axvspan(
            span.start_s - start_s, span.end_s - start_s, color=_GRID, alpha=0.6, linewidth=0, zorder=0
        )
        _write_above(axes, (span.start_s + span.end_s) / 2 - start_s, span.label, 8.5)
    axes.set(xlabel="seconds since the requests were sent", ylabel="MB", xlim=(0, times_s[-1]))
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside lower right", ncols=4, fontsize=8.5)


def _write_above(axes: Axes, x: float, text: str, size: float) -> None:
    axes.annotate(
        *(text, (x, 1.0), (0, 4)),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        ha="center",
        fontsize=size,
        color=_FAINT,
    )


def write_picture(path: Path, results: Results) -> None:
    """Write all plots to one PNG."""
    with mpl.rc_context(_PLOT_STYLE):
        figure = Figure(figsize=(13.5, 11), layout="constrained")
        top, bottom = _split(figure, 2, 1, height_ratios=(2, 1))
        left, right = _split(top, 1, 2, width_ratios=(1, 1.55))
        logprobs = importance_ratios if results.is_fp8 else logprob_difference
        for place, plot in zip(_split(left, 2, 1), (reward, logprobs), strict=True):
            plot(place, results)
        memory_by_stage(right, results)
        if results.elastic is not None:
            memory_under_requests(bottom, results.elastic)
        figure.savefig(path, dpi=130)


def _memory_series(samples: Sequence[MemorySample]) -> list[tuple[str, str, list[float]]]:
    """Name, colour and MB of each quantity."""
    return [
        ("the engine's processes (Pss)", _INK, [sample.process_bytes / MB for sample in samples]),
        ("kv_cache", _TEAL, [sample.tag_bytes["kv_cache"] / MB for sample in samples]),
        ("weights", _AMBER, [sample.tag_bytes["weights"] / MB for sample in samples]),
    ]


def _split(figure: FigureBase, rows: int, columns: int, **ratios: Any) -> list[FigureBase]:
    return list(np.atleast_1d(figure.subfigures(rows, columns, **ratios)).flat)


def _after_each_stage(steps: Sequence[StepRecord]) -> list[MemorySample]:
    return [step.stages[stage].memory for step in steps for stage in Stage]


def _step_limits(results: Results) -> tuple[float, float]:
    margin = 0.5 + 0.01 * len(results.steps)
    return -margin, len(results.steps) - 1 + margin


_STYLE = """
body { margin: 0 auto; padding: 2rem 1.5rem; max-width: 68rem; color: #1b2733; background: #fff;
  font: 16px/1.55 system-ui, sans-serif; }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; } p { max-width: 54rem; color: #45566a; } img { width: 100%; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(18rem, 1fr)); gap: .9rem; }
.card { border: 1px solid #e3e8ee; border-radius: .6rem; padding: .9rem 1.1rem; }
.card b { display: block; font-size: 1.45rem; } .wrong { color: #b3372b; }
table { display: block; overflow-x: auto; border-collapse: collapse; font-size: .82rem; }
th, td { padding: .22rem .65rem; text-align: right; border-bottom: 1px solid #e3e8ee; white-space: nowrap; }
"""


def write_report(folder: Path, results: Results) -> Path:
    """Write `report.html` and `demo.png`; returns the path of the former. There must be at least one step."""
    picture = folder / "demo.png"
    write_picture(picture, results)
    path = folder / "report.html"
    path.write_text(_page(results, picture.read_bytes()), encoding="utf-8")
    return path


def _page(results: Results, picture: bytes) -> str:
    title = "Ebbtide demo: a model learns addition"
    image = f'<img alt="all plots" src="data:image/png;base64,{base64.b64encode(picture).decode()}">'
    sections = (_introduction(results), _cards(results), image, _memory(results), _logprobs(results))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>\n'
        f"<body><h1>{title}</h1>\n" + "\n".join((*sections, _steps(results))) + "\n</body></html>\n"
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
    after = "?" if results.after is None else f"{results.after:.0%}"
    cards = [
        (f"{results.first_reward:.2f} → {results.last_reward:.2f}", "reward: sampled answers that are right"),
        (f"{results.before:.0%} → {after}", "held-out sums that are answered right, greedily"),
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


def _memory(results: Results) -> str:
    text = (
        "<h2>Memory</h2><p>Weights and KV cache: resident bytes as the engine reports them. The processes: "
        "proportional set size (Pss) of all of the engine's processes, as the operating system counts it, "
        "but for mapped files; what remains while everything is released is their working memory.</p>"
    )
    if results.elastic is None:
        return text
    return text + (
        f"<p>At the end the trained model answers {results.elastic.num_requests} questions at length, while "
        "a trainer takes seven eighths of the KV cache for a while, and then all of it. Requests that have "
        "no room are parked: their KV waits in host memory, and they go on from there. All answers are token "
        "for token those of an undisturbed engine.</p>"
    )


def _logprobs(results: Results) -> str:
    if not results.is_fp8:
        return (
            "<h2>Trainer and engine agree</h2><p>Before it learns, the trainer computes the log-probability "
            "of every token that the engine sampled, with the same weights, in float32.</p>"
        )
    kl = median(step.ratios.divergence for step in results.steps)
    share = max(step.ratios.truncated for step in results.steps)
    return (
        "<h2>Trainer and engine differ</h2><p>Before it learns, the trainer computes the log-probability "
        "of every token that the engine sampled, in float32 and by the weights that it had sent. The "
        "importance ratio is its probability by the engine's. In the loss each token weighs as much as its "
        f"ratio, but no more than {LARGEST_WEIGHT:g}, so that the trainer learns what it would from rollouts "
        f"of its own. Per token the engine is {kl:.1e} nats away (median of the steps); at most {share:.2%} "
        "of a step's tokens are truncated.</p>"
    )


def _steps(results: Results) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name, _, _ in COLUMNS)
    rows = ["".join(f"<td>{escape(cell(step))}</td>" for _, _, cell in COLUMNS) for step in results.steps]
    body = "".join(f"<tr>{row}</tr>\n" for row in rows)
    return (
        "<h2>Steps</h2><p>MB (10⁶ bytes): while the engine generates → while the trainer trains. Measured "
        f"on {len(os.sched_getaffinity(0))} cores with Ebbtide {version('ebbtide')} and torch "
        f"{version('torch')}.</p><table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table>"
    )
