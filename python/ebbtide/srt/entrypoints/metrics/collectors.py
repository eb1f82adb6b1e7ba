"""What prometheus-client has no metric for: histograms of weighted values, pauses for garbage collection."""

from __future__ import annotations

import gc
import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Final

from prometheus_client import Counter
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from ebbtide.srt.managers.io_struct import STALL_BOUNDS_S, STEP_BOUNDS, Load

# Seconds: a young generation takes microseconds, a full collection of a large heap seconds.
GC_BUCKETS_S: Final = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0)
NUM_GENERATIONS: Final = 3


class BucketCounts:
    """How many values lie in each bucket, without a lock.

    One more bucket has what is larger than all `bounds`.
    """

    def __init__(self, bounds: Sequence[float], counts: Sequence[int] | None = None) -> None:
        self.sum = 0.0
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1) if counts is None else list(counts)

    def add(self, value: float, count: int = 1) -> None:
        """Count a value, as often as `count` says."""
        self._counts[bisect_left(self._bounds, value)] += count
        self.sum += value * count

    def cumulative(self) -> list[tuple[str, float]]:
        """Each bound, as text, with the number of values up to it."""
        names = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        return list(zip(names, accumulate(self._counts), strict=True))


class WeightedHistogram(Collector):
    """A histogram that takes a value many times in one step."""

    def __init__(self, name: str, help_text: str, bounds: Sequence[float]) -> None:
        self._name, self._help_text = name, help_text
        self._counts = BucketCounts(bounds)

    def observe(self, value: float, count: int) -> None:
        self._counts.add(value, count)

    def collect(self) -> Iterable[HistogramMetricFamily]:
        buckets = self._counts.cumulative()
        yield HistogramMetricFamily(self._name, self._help_text, buckets=buckets, sum_value=self._counts.sum)


class OperationStalls(Collector):
    """For how long control requests kept forward passes from running, as the replicas last said."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loads: Sequence[Load] = ()

    def set(self, loads: Sequence[Load]) -> None:
        """Take over what replicas have counted since their start."""
        self._loads = loads

    def collect(self) -> Iterable[HistogramMetricFamily]:
        help_text = "The longest time for which a control operation kept a replica from forward passes."
        family = HistogramMetricFamily(self._name, help_text, labels=["operation"])
        for operation in sorted({name for load in self._loads for name in load.stalls}):
            stalls = [load.stalls[operation] for load in self._loads if operation in load.stalls]
            counts = BucketCounts(
                STALL_BOUNDS_S, [sum(column) for column in zip(*(one.counts for one in stalls), strict=True)]
            )
            family.add_metric([operation], counts.cumulative(), sum(one.sum_s for one in stalls))
        yield family


class StepTokens(Collector):
    """How many tokens forward passes had, as the replicas last said."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.loads: Sequence[Load] = ()

    def collect(self) -> Iterable[HistogramMetricFamily]:
        help_text = "Tokens of each forward pass: of prompts, and one of each request that decodes."
        family = HistogramMetricFamily(self._name, help_text, labels=["dp_rank"])
        for load in self.loads:
            buckets = BucketCounts(STEP_BOUNDS, load.step_counts).cumulative()
            family.add_metric([str(load.dp_rank)], buckets, load.step_tokens)
        yield family


class RisingTotals:
    """Counters of what others count: they say the total, and a restart of theirs is none of ours."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._last: dict[tuple[str, ...], float] = {}

    def set(self, total: float, *labels: str) -> None:
        """Bring the counter up to a total."""
        rise = total - self._last.get(labels, 0.0)
        self._last[labels] = total
        self._counter.labels(*labels).inc(max(0.0, rise))


class GcPauses(Collector):
    """How long Python's garbage collector held this process up, from `install` to `remove`.

    The collector may run wherever something is allocated, in prometheus-client under its locks too: a
    `Histogram` would deadlock there, and so these counts have no lock. No two collections run at once.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._counts = [BucketCounts(GC_BUCKETS_S) for _ in range(NUM_GENERATIONS)]
        self._started_s: float | None = None

    def install(self) -> None:
        """Time collections from now on."""
        gc.callbacks.append(self._note)

    def remove(self) -> None:
        """Stop timing them. Idempotent."""
        if self._note in gc.callbacks:
            gc.callbacks.remove(self._note)

    def collect(self) -> Iterable[HistogramMetricFamily]:
        help_text = "Pauses of the API process for Python's garbage collector."
        family = HistogramMetricFamily(self._name, help_text, labels=["generation"])
        for generation, counts in enumerate(self._counts):
            family.add_metric([str(generation)], counts.cumulative(), counts.sum)
        yield family

    def _note(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._started_s = time.perf_counter()
        elif self._started_s is not None:
            self._counts[info["generation"]].add(time.perf_counter() - self._started_s)
            self._started_s = None
