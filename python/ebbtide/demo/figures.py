"""The plots of the report, and the picture of all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure, FigureBase
from matplotlib.ticker import NullFormatter

from ebbtide.demo.loop import (
    FIRST_REWARD_BELOW,
    LAST_REWARD_ABOVE,
    MAX_LOGPROB_DIFFERENCE,
    MB,
    Results,
    Stage,
    StepRecord,
)
from ebbtide.demo.memory import MemorySample
from ebbtide.demo.trainer import LARGEST_WEIGHT

_INK, _FAINT, _GRID = "#1b2733", "#66788a", "#e3e8ee"
_BLUE, _TEAL, _AMBER = "#2563a8", "#3aa6a0", "#d9822b"
_STYLE: Any = {
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
Plot = Callable[[FigureBase, Results], None]


def reward(figure: FigureBase, results: Results) -> None:
    """Mean reward by step."""
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
    """Greatest difference of any token's logprob between trainer and engine, by step."""
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
    """How much likelier tokens are for the trainer than for the engine, which rounds, by step."""
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


def memory_over_time(figure: FigureBase, results: Results) -> None:
    """Memory after every stage of every step, against time."""
    axes = figure.subplots()
    axes.set_title("Resident memory over time, all steps")
    samples = [results.start, *_after_each_stage(results.steps)]
    times_s = [sample.time_s for sample in samples]
    for name, color, values in _memory_series(samples):
        axes.plot(times_s, values, color=color, linewidth=1.1, label=name)
    axes.set(xlabel="seconds since the engine started", ylabel="MB", xlim=(times_s[0], times_s[-1]))
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside lower right", ncols=3, fontsize=8.5)


def memory_by_stage(figure: FigureBase, results: Results) -> None:
    """Memory through the stages of the last two steps; every stage is drawn equally wide."""
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
        label = f"{stage.replace(' ', chr(10))}\n{time_ms:,.0f} ms"
        rows[0].annotate(
            label,
            (index + 0.5, 1.0),
            (0, 4),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha="center",
            fontsize=7.5,
            color=_FAINT,
        )
    rows[-1].set_xlim(0, len(shown) * len(Stage))


def memory_under_requests(figure: FigureBase, results: Results) -> None:
    """Memory by tag while requests run, and who else had it."""
    assert results.elastic is not None
    axes = figure.subplots()
    axes.set_title("Resident memory while requests run: a smaller KV cache, and none at all", pad=34)
    samples = results.elastic.samples
    start_s = samples[0].time_s
    times_s = [sample.time_s - start_s for sample in samples]
    series = [*_memory_series(samples), ("parked KV", _BLUE, [s.parked_bytes / MB for s in samples])]
    for name, color, values in series:
        axes.plot(times_s, values, color=color, linewidth=1.8, label=name)
        if name != series[0][0]:
            axes.fill_between(times_s, values, color=color, alpha=0.15, linewidth=0)
    for span in results.elastic.spans:
        axes.axvspan(
            span.start_s - start_s, span.end_s - start_s, color=_GRID, alpha=0.6, linewidth=0, zorder=0
        )
        middle = ((span.start_s + span.end_s) / 2 - start_s, 1.0)
        axes.annotate(
            span.label,
            middle,
            (0, 4),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha="center",
            fontsize=8.5,
            color=_FAINT,
        )
    axes.set(xlabel="seconds since the requests were sent", ylabel="MB", xlim=(0, times_s[-1]))
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside lower right", ncols=4, fontsize=8.5)


def svg(plot: Plot, results: Results, width: float, height: float) -> bytes:
    """One plot by itself; width and height in inches."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        plot(figure, results)
        image = BytesIO()
        figure.savefig(image, format="svg", metadata={"Date": None})
    return image.getvalue()


def write_picture(path: Path, results: Results) -> None:
    """All plots in one PNG."""
    with mpl.rc_context(_STYLE):
        if results.elastic is not None:
            figure = Figure(figsize=(13.5, 11), layout="constrained")
            top, bottom = _split(figure, 2, 1, height_ratios=(2.3, 1))
            memory_under_requests(bottom, results)
        else:
            figure = Figure(figsize=(13.5, 7.8), layout="constrained")
            top = figure
        left, right = _split(top, 1, 2, width_ratios=(1, 1.55))
        places = (*_split(left, 2, 1), *_split(right, 2, 1, height_ratios=(1.25, 1)))
        logprobs = importance_ratios if results.is_fp8 else logprob_difference
        plots = (reward, logprobs, memory_by_stage, memory_over_time)
        for place, plot in zip(places, plots, strict=True):
            plot(place, results)
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
