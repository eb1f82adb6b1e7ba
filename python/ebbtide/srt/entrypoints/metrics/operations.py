"""Metrics of control operations, weight commits, and the age of tokens' weights.

Labels are only names of operations, tags and states, so the number of series is bounded.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from ebbtide.srt.entrypoints.metrics.collectors import WeightedHistogram
from ebbtide.srt.errors import EngineError, RequestRejected
from ebbtide.srt.managers import io_struct
from ebbtide.srt.managers.io_struct import (
    CONTROL_REQUESTS,
    STALL_BOUNDS_S,
    ControlRequest,
    PauseMode,
    Reply,
    StateReport,
)
from ebbtide.srt.memory_saver import MemoryTag

T = TypeVar("T")

# Prometheus reserves colons for recording rules; the names in `prometheus` have one, like SGLang's.
PREFIX: Final = "ebbtide_"
# In seconds: from a short pause to an update that waits until its deadline.
DURATION_BUCKETS_S: Final = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
LAG_BUCKETS: Final = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64)
# How many versions are remembered. A rollout spans only a few.
MAX_VERSIONS: Final = 4096

TRANSITION: Final = "transition"
# Kind of request → its name, that of its endpoint.
OPERATIONS: Final[Mapping[type[ControlRequest], str]] = {
    kind: kind.row.path.removeprefix("/") for kind in CONTROL_REQUESTS if kind.row.path is not None
}
# Field of replies with a number of requests → what happened to them.
EFFECTS: Final = {
    "num_retracted": "retracted",
    "num_parked": "parked",
    "num_aborted": "aborted",
    "num_paused_requests": "paused",
}


class VersionLag:
    """Tells how many commits ago a version of the weights was the newest."""

    def __init__(self, version: str) -> None:
        self._num_commits = 0
        self._last_commit: OrderedDict[str, int] = OrderedDict({version: 0})

    def commit(self, version: str) -> None:
        """Note a commit of new weights with this version. Commits of equal versions are not distinguished."""
        self._num_commits += 1
        self.rename(version)

    def rename(self, version: str) -> None:
        """Note that the serving weights have this version from now on."""
        self._last_commit[version] = self._num_commits
        self._last_commit.move_to_end(version)
        if len(self._last_commit) > MAX_VERSIONS:
            self._last_commit.popitem(last=False)

    def of(self, version: str) -> int:
        """The number of commits since this version; 0 for an unknown one, whose commit is not noted yet."""
        return self._num_commits - self._last_commit.get(version, self._num_commits)


@dataclass(frozen=True)
class EndedOperation:
    """A control operation that has ended.

    `started_s`: since 1970. `outcome`: done, incomplete, refused, failed or abandoned. `reply`: None: none.
    """

    operation: str
    started_s: float
    duration_s: float
    outcome: str
    message: str
    reply: Reply | None


Ending: TypeAlias = Callable[[EndedOperation], None]


class Observer(Protocol):
    """Is told of control operations and outputs."""

    def begin(self, operation: str) -> Ending:
        """Note the start of a control operation. Returns a function to call at its end."""

    def note_output(self, meta: Mapping[str, Any]) -> None:
        """Note an output that has ended, by its `meta_info`."""


class ControlMetrics:
    """Counts control operations, and the tokens of ended outputs by the age of their weights.

    `observers`: are told of each operation and each ended output. `version_lag`: the age of weights.
    """

    def __init__(self, registry: CollectorRegistry, version: str) -> None:
        self.observers: list[Observer] = []
        self._registry = registry
        self.version_lag = VersionLag(version)
        self._operations(registry)
        self._effects(registry)
        self._lag = WeightedHistogram(
            PREFIX + "output_token_lag_commits",
            "Tokens of ended outputs, by the number of commits between their weights and the newest ones.",
            LAG_BUCKETS,
        )
        registry.register(self._lag)
        self._mixed = self._counter("mixed_version_outputs", "Outputs with tokens of several versions.")

    def _operations(self, registry: CollectorRegistry) -> None:
        self._duration_s = Histogram(
            PREFIX + "control_operation_duration_seconds",
            "From the request to its answer, refusals included.",
            ["operation"],
            registry=registry,
            buckets=DURATION_BUCKETS_S,
        )
        self._ended = self._counter(
            *("control_operations", "Control operations that have ended."),
            *("operation", "outcome", "status"),
        )
        self._running = self._gauge(
            "control_operations_in_progress", "Control operations under way.", "operation"
        )
        for operation in (*OPERATIONS.values(), TRANSITION):
            # Start each series at 0: without it, a rate would miss the first operation.
            self._duration_s.labels(operation)
            self._running.labels(operation)
            self._ended.labels(operation, "done", "200")

    def _effects(self, registry: CollectorRegistry) -> None:
        self._stall_s = Histogram(
            PREFIX + "weight_update_stall_seconds",
            "How long a commit delayed forward passes.",
            ["operation"],
            registry=registry,
            buckets=STALL_BOUNDS_S,
        )
        self._update_bytes = self._counter(
            "weight_update_bytes", "Bytes that updates wrote.", "operation", "placement"
        )
        self._commits = self._counter("weight_commits", "Commits of new weights.")
        self._released = self._counter("released_bytes", "Bytes given back by releases.", "tag")
        self._resumed = self._counter("resumed_bytes", "Bytes taken again by resumes.", "tag")
        self._resized = self._counter("resized_bytes", "Bytes that KV resizes gave or took.", "direction")
        self._parked = self._counter("parked_bytes", "KV that releases and resizes moved to host memory.")
        self._requests = self._counter(
            "control_affected_requests", "Requests that an operation interrupted.", "operation", "effect"
        )
        for tag in MemoryTag:
            self._released.labels(tag.value)
            self._resumed.labels(tag.value)

    # ------------------------------------------------------------------------------------------- operations

    async def observed(self, operation: str, work: Awaitable[T]) -> T:
        """Await an operation, and count how it ended. `operation`: of `OPERATIONS`, or `TRANSITION`."""
        began_s, started_s = time.time(), time.perf_counter()
        outcome, status, message = "failed", "500", ""
        reply: Reply | None = None
        endings = [observer.begin(operation) for observer in self.observers]
        self._running.labels(operation).inc()
        try:
            result = await work
            outcome, status = "done", "200"
            if isinstance(result, Reply):
                reply, message = result, result.message
                if not result.success:
                    outcome, status = "incomplete", "400"
                self._note(operation, result)
            return result
        except RequestRejected as error:
            outcome, status, message = "refused", str(error.status), str(error)
            raise
        except EngineError as error:
            message = str(error)
            raise
        except asyncio.CancelledError:
            # Only its caller was cancelled: the operation goes on, but its end is not observed.
            outcome, status = "abandoned", "499"
            raise
        finally:
            duration_s = time.perf_counter() - started_s
            self._running.labels(operation).dec()
            self._duration_s.labels(operation).observe(duration_s)
            self._ended.labels(operation, outcome, status).inc()
            ended = EndedOperation(operation, began_s, duration_s, outcome, message, reply)
            for end in reversed(endings):
                end(ended)

    def _note(self, operation: str, reply: Reply) -> None:
        match reply:
            case io_struct.UpdateWeightsReqOutput():
                self._note_update(operation, reply)
            case io_struct.UpdateWeightVersionReqOutput():
                self.version_lag.rename(reply.new_version)
            case io_struct.ReleaseMemoryOccupationReqOutput():
                self._parked.inc(reply.parked_bytes)
                for tag, num_bytes in reply.freed_bytes.items():
                    self._released.labels(tag.value).inc(num_bytes)
            case io_struct.ResumeMemoryOccupationReqOutput():
                for tag, num_bytes in reply.mapped_bytes.items():
                    self._resumed.labels(tag.value).inc(num_bytes)
            case io_struct.ResizeMemoryOccupationReqOutput():
                self._parked.inc(reply.parked_bytes)
                direction = "released" if reply.moved_bytes < 0 else "taken"
                self._resized.labels(direction).inc(abs(reply.moved_bytes))
        for name, effect in EFFECTS.items():
            if num_requests := getattr(reply, name, 0):
                self._requests.labels(operation, effect).inc(num_requests)

    def _note_update(self, operation: str, reply: io_struct.UpdateWeightsReqOutput) -> None:
        # The reply at the end of a session repeats the bytes of its updates, which have been counted.
        if operation != OPERATIONS[io_struct.EndWeightUpdateReqInput]:
            placement = "staged" if reply.staged else "in_place"
            self._update_bytes.labels(operation, placement).inc(reply.num_bytes)
        if reply.committed:
            self._commits.inc()
            self._stall_s.labels(operation).observe(reply.stall_ms / 1e3)
            self.version_lag.commit(reply.weight_version)

    # --------------------------------------------------------------------------------------- outputs, state

    def note_spans(self, spans: Sequence[Mapping[str, Any]]) -> None:
        """Count the tokens of an ended output by the age of their weights. `spans`: its `weight_versions`."""
        for span in spans:
            self._lag.observe(self.version_lag.of(span["version"]), span["end"] - span["start"])
        if len({span["version"] for span in spans}) > 1:
            self._mixed.inc()

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, help_text, labels, registry=self._registry)

    def _gauge(self, name: str, help_text: str, *labels: str) -> Gauge:
        return Gauge(PREFIX + name, help_text, labels, registry=self._registry)


def reasons(state: StateReport) -> dict[str, bool]:
    """Each possible reason why no forward pass may run → whether it holds on any rank."""
    tags = {tag: [rank.tags[tag] for rank in state.ranks] for tag in MemoryTag}
    return {
        **{f"paused_{mode.value}": state.paused is mode for mode in PauseMode},
        **{
            f"{tag.value}_released": any(report.state == "released" for report in reports)
            for tag, reports in tags.items()
        },
        "weights_stale": any(report.content == "stale" for report in tags[MemoryTag.WEIGHTS]),
    }
