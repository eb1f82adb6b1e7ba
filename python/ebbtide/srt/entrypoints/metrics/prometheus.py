"""Prometheus metrics. Source: wire_api section 3.4."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from ebbtide.srt.entrypoints.metrics.collectors import (
    SLEEP_STATES,
    BucketCounts,
    GcPauses,
    SglangAliases,
    VllmAliases,
    WeightedHistogram,
    histograms,
)
from ebbtide.srt.entrypoints.metrics.operations import (
    PREFIX as CONTROL_PREFIX,
    ControlMetrics,
    VersionLag,
    reasons,
)
from ebbtide.srt.managers.api.log import PauseWatch
from ebbtide.srt.managers.io_struct import (
    STALL_BOUNDS_S,
    STEP_BOUNDS,
    Load,
    RetractCause,
    StallCounts,
    StateReport,
)
from ebbtide.srt.memory_saver import MemoryTag

PREFIX = "ebbtide:"
# In seconds: from the first token of a short prompt to a long rollout.
LATENCY_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000)
# In seconds: from a small model's token to one that waited for an update.
GAP_BUCKETS_S = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5, 5, 10)
# In tokens: from a word to the longest contexts.
LENGTH_BUCKETS = (
    *(1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000),
    *(10_000, 20_000, 50_000, 100_000, 200_000),
)
RETRACTION_BUCKETS = (0, 1, 2, 3, 5, 10, 20)
SAMPLE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)
# Counters of ended outputs: name → key of `meta_info`, help text.
COUNTERS = {
    "prompt_tokens": ("prompt_tokens", "Prompt tokens of outputs that have ended."),
    "cached_tokens": ("cached_tokens", "Prompt tokens from the prefix cache."),
    "generation_tokens": ("completion_tokens", "Tokens generated."),
    "num_retractions": ("num_retractions", "Times that outputs were retracted."),
    "nonfinite_logits": ("num_nonfinite", "Rows of logits that held NaN or +Inf."),
}
# Histograms of ended outputs: name → keys of `meta_info` (the first minus the second), help text.
DURATIONS: Mapping[str, tuple[str, str | None, str]] = {
    "e2e_request_latency_seconds": ("e2e_latency", None, "From arrival to the last token."),
    "time_to_first_token_seconds": ("first_token_latency", None, "From arrival to the first token."),
    "queue_time_seconds": ("queue_time", None, "From arrival to the first forward pass."),
    "inference_seconds": ("e2e_latency", "queue_time", "From the first forward pass to the last token."),
    "prefill_seconds": (
        *("first_token_latency", "queue_time"),
        "From the first forward pass to the first token.",
    ),
    "decode_seconds": ("e2e_latency", "first_token_latency", "From the first token to the last one."),
}
# Histograms of ended outputs: name → key of `meta_info`, buckets, help text.
SIZES: Mapping[str, tuple[str, Sequence[float], str]] = {
    "output_prompt_tokens": ("prompt_tokens", LENGTH_BUCKETS, "Prompt tokens of each output."),
    "output_generation_tokens": ("completion_tokens", LENGTH_BUCKETS, "Tokens of each output."),
    "output_retractions": ("num_retractions", RETRACTION_BUCKETS, "Times that each output was retracted."),
}
# How many outputs are counted before the event loop may run something else. They take some milliseconds.
OUTPUTS_AT_ONCE = 256
# Field of `Load`, which has a value per replica → help text.
LOAD_GAUGES = {
    "num_running_reqs": "Running requests, unless generation is paused.",
    "num_waiting_reqs": "Requests that wait for room.",
    "num_paused_reqs": "Requests that keep their KV while generation is paused.",
    "num_used_tokens": "Tokens in use in the KV pool.",
    "max_total_num_tokens": "Capacity of the KV pool, in tokens.",
    "token_usage": "Share of the KV pool that is in use.",
    "gen_throughput": "Tokens per second.",
    "cache_hit_rate": "Share of prompt tokens from the prefix cache.",
    "num_parked_reqs": "Requests that wait with their KV in host memory.",
    "parked_bytes": "KV of waiting requests in host memory, on each rank.",
    "lent_bytes": "Memory of the KV cache lent to a second copy of the weights, on each rank.",
}


# Labels: how many commits ago the weights served with which KV was computed.
KV_LAGS: Final = ("0", "1", "2", "3 or more")
# Pairs of the labels' values and a number.
Rows: TypeAlias = Sequence[tuple[tuple[str, ...], float]]

# Name → help text, in the order of the values in `Readings`.
STATE_GAUGES: Final = {
    PREFIX + "can_run": "1 if a forward pass may run now.",
    PREFIX + "weights_stale": "1 if parameters have not been written since a resume.",
    PREFIX + "adapters_loaded": "Adapters that requests may ask for.",
    CONTROL_PREFIX + "not_running_seconds": "Seconds since a forward pass was last allowed to run.",
    CONTROL_PREFIX + "pause_forgotten": "1 if not_running_seconds exceeds --pause-warning-s.",
    CONTROL_PREFIX + "weight_session_open": "1 while a weight update session is open.",
}

# This many adapters, the first ones, have labels of their own. Adapters' names cannot contain "@".
MAX_ADAPTERS: Final = 64
OTHER_ADAPTERS: Final = "@other"


class Metrics:
    """Counts the outputs that were answered, over HTTP and in Python, and shows the engine's state.

    `aliases`: whose names the text has in addition, sglang or vllm; None: none.
    """

    content_type = CONTENT_TYPE_LATEST

    def __init__(
        self, version: str, aliases: str | None = None, *, model_name: str = "", page_size: int = 1
    ) -> None:
        self._registry = CollectorRegistry()
        self.control = ControlMetrics(self._registry, version)
        self.gc_pauses = GcPauses(CONTROL_PREFIX + "gc_pause_seconds")
        self._registry.register(self.gc_pauses)
        self._requests = self._counter("num_requests", "Outputs that have ended.", "finish_reason")
        self._adapter_tokens = self._counter(
            "adapter_generation_tokens", "Output tokens, by the adapter of the request.", "adapter"
        )
        self._adapter_names: set[str] = set()
        self._counters = {name: (self._counter(name, text), key) for name, (key, text) in COUNTERS.items()}
        # With the keys of their values: the first minus the second.
        self._histograms = [
            (self._histogram(name, text, LATENCY_BUCKETS_S), end, start)
            for name, (end, start, text) in DURATIONS.items()
        ] + [
            (self._histogram(name, text, buckets), key, None) for name, (key, buckets, text) in SIZES.items()
        ]
        self._inter_token_s = WeightedHistogram(
            PREFIX + "inter_token_latency_seconds",
            "Between two tokens of an output: the mean of each output, counted for each of its gaps.",
            GAP_BUCKETS_S,
        )
        self._registry.register(self._inter_token_s)
        self._token_s = self._histogram(
            "time_per_output_token_seconds", "Between two tokens: the mean of each output.", GAP_BUCKETS_S
        )
        self._num_samples = self._histogram(
            "request_params_n", "Outputs per prompt that each request asks for.", SAMPLE_BUCKETS
        )
        self._max_tokens = self._histogram(
            "request_params_max_tokens", "Limit of an output's tokens in each request.", LENGTH_BUCKETS
        )
        self._readings = Readings(self.control.version_lag)
        self._registry.register(self._readings)
        self._aliases = CollectorRegistry()
        self._vllm: VllmAliases | None = None
        if aliases == "vllm":
            self._vllm = VllmAliases(self._registry, model_name, page_size)
            self._aliases.register(self._vllm)
        elif aliases == "sglang":
            self._aliases.register(SglangAliases(self._registry))

    async def note_all(self, result: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Count an answer of `/generate`: an output, or a list. Long lists do not block the event loop."""
        outputs = [result] if isinstance(result, Mapping) else result
        for start in range(0, len(outputs), OUTPUTS_AT_ONCE):
            if start:
                await asyncio.sleep(0)
            for output in outputs[start : start + OUTPUTS_AT_ONCE]:
                self.note(output["meta_info"])

    def note_chunk(self, chunk: Mapping[str, Any]) -> None:
        """Count the output of a chunk, if the chunk ends it."""
        meta = chunk["meta_info"]
        if meta["finish_reason"] is not None:
            self.note(meta)

    def text(self, state: StateReport, loads: Sequence[Load], pause: PauseWatch) -> bytes:
        """All metrics in Prometheus' text format."""
        self._set(state, loads, pause)
        return generate_latest(self._registry) + generate_latest(self._aliases)

    def values(self, state: StateReport, loads: Sequence[Load], pause: PauseWatch) -> dict[str, float]:
        """All samples, by name and labels in the form of the text format."""
        self._set(state, loads, pause)
        return {
            _sample_key(sample.name, sample.labels): float(sample.value)
            for family in self._registry.collect()
            for sample in family.samples
            if not sample.name.endswith("_created")
        }

    def _set(self, state: StateReport, loads: Sequence[Load], pause: PauseWatch) -> None:
        """Set the metrics that are read rather than counted."""
        self._readings.last = state, loads, pause
        if self._vllm is not None:
            self._vllm.sleep_state = _sleep_state(state)
            self._vllm.num_tokens = {load.dp_rank: load.max_total_num_tokens for load in loads}

    def note(self, meta: Mapping[str, Any]) -> None:
        """Count an output that has ended, by its `meta_info`."""
        self._requests.labels(meta["finish_reason"]["type"]).inc()
        if (adapter := meta.get("lora_name")) is not None:
            self._adapter_tokens.labels(self._label_of(adapter)).inc(meta["completion_tokens"])
        for counter, key in self._counters.values():
            counter.inc(meta[key])
        for histogram, end, start in self._histograms:
            histogram.observe(meta[end] - (0 if start is None else meta[start]))
        num_gaps = meta["completion_tokens"] - 1
        if num_gaps > 0:
            mean_s = (meta["e2e_latency"] - meta["first_token_latency"]) / num_gaps
            self._token_s.observe(mean_s)
            self._inter_token_s.observe(mean_s, num_gaps)
        self.control.note_spans(meta["weight_versions"])
        for observer in self.control.observers:
            observer.note_output(meta)

    def _label_of(self, adapter: str) -> str:
        """The label of an adapter. The number of labels is limited, since adapters may come without end."""
        if len(self._adapter_names) < MAX_ADAPTERS:
            self._adapter_names.add(adapter)
        return adapter if adapter in self._adapter_names else OTHER_ADAPTERS

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, help_text, labels, registry=self._registry)

    def note_taken(self, num_samples: int, max_new_tokens: int) -> None:
        """Count an accepted request: its outputs per prompt, and the limit of their tokens."""
        self._num_samples.observe(num_samples)
        self._max_tokens.observe(max_new_tokens)

    def _histogram(self, name: str, help_text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(PREFIX + name, help_text, registry=self._registry, buckets=buckets)


class Readings(Collector):
    """Metrics that are read on request: the engine's state, and the counts of replicas.

    `last`: the state, the load of each replica, and the watch of pauses; None: not read yet.
    """

    last: tuple[StateReport, Sequence[Load], PauseWatch] | None = None

    def __init__(self, lag: VersionLag) -> None:
        self._lag = lag

    def collect(self) -> Iterator[Metric]:
        if self.last is not None:
            state, loads, pause = self.last
            yield from self._of_replicas([(str(load.dp_rank), load) for load in loads])
            yield from self._of_state(state, pause)

    def _of_replicas(self, loads: Sequence[tuple[str, Load]]) -> Iterator[Metric]:
        rows: list[tuple[tuple[str, ...], float]]
        for name, text in LOAD_GAUGES.items():
            rows = [((rank,), getattr(load, name)) for rank, load in loads]
            yield _gauge(PREFIX + name, text, rows, "dp_rank")
        rows = []
        for rank, load in loads:
            rows.append(((rank, "capacity"), load.num_waiting_reqs - load.num_held_reqs))
            rows.append(((rank, "deferred"), load.num_held_reqs))
        text = "Waiting requests, by what they wait for: room, or a version of the weights."
        yield _gauge(PREFIX + "num_waiting_reqs_by_reason", text, rows, "dp_rank", "reason")
        rows = [(pair, num_tokens) for rank, load in loads for pair, num_tokens in self._by_lag(rank, load)]
        text = "Tokens of KV of running requests, by commits since its weights served."
        yield _gauge(CONTROL_PREFIX + "kv_tokens", text, rows, "dp_rank", "commits")
        name, text = CONTROL_PREFIX + "recomputed_tokens", "Tokens that were prefilled again."
        recomputed = CounterMetricFamily(name, text, labels=["dp_rank", "cause"])
        name, text = CONTROL_PREFIX + "scheduler_gc_pause_seconds", "GC pauses of a replica's loop."
        paused = CounterMetricFamily(name, text, labels=["dp_rank"])
        for rank, load in loads:
            paused.add_metric([rank], load.gc_pause_s)
            for cause in RetractCause:
                recomputed.add_metric([rank, cause], load.recomputed_tokens.get(cause, 0))
        yield from (recomputed, paused)
        text = "Tokens of each forward pass: of prompts, and one of each request that decodes."
        steps = [
            (rank, BucketCounts(STEP_BOUNDS, load.step_counts, load.step_tokens)) for rank, load in loads
        ]
        yield histograms(PREFIX + "step_tokens", text, "dp_rank", steps)
        text = "The longest time for which a control operation delayed a replica's forward passes."
        stalls = _stalls([load.stalls for _, load in loads])
        yield histograms(CONTROL_PREFIX + "control_operation_stall_seconds", text, "operation", stalls)

    def _by_lag(self, rank: str, load: Load) -> Rows:
        """Tokens of KV by the number of commits since their weights served."""
        by_lag = dict.fromkeys(KV_LAGS, 0)
        for version, num_tokens in load.kv_tokens.items():
            by_lag[KV_LAGS[min(self._lag.of(version), len(KV_LAGS) - 1)]] += num_tokens
        return [((rank, lag), num_tokens) for lag, num_tokens in by_lag.items()]

    def _of_state(self, state: StateReport, pause: PauseWatch) -> Iterator[Metric]:
        values = (
            state.can_run,
            any(rank.tags[MemoryTag.WEIGHTS].content == "stale" for rank in state.ranks),
            len(state.adapter_versions),
            pause.blocked_s,
            pause.is_forgotten,
            state.session is not None,
        )
        for (name, text), value in zip(STATE_GAUGES.items(), values, strict=True):
            yield _gauge(name, text, [((), value)])
        blocked = [((reason,), holds) for reason, holds in reasons(state).items()]
        text = "1 for each reason why no forward pass may run."
        yield _gauge(CONTROL_PREFIX + "not_running", text, blocked, "reason")
        tags = [(tag, [rank.tags[tag] for rank in state.ranks]) for tag in MemoryTag]
        resident = [((tag.value,), sum(report.resident_bytes for report in reports)) for tag, reports in tags]
        yield _gauge(PREFIX + "resident_bytes", "Device memory by tag, all ranks.", resident, "tag")
        backup = [((tag.value,), sum(report.backup_bytes for report in reports)) for tag, reports in tags]
        text = "Host memory with copies of released memory."
        yield _gauge(CONTROL_PREFIX + "backup_bytes", text, backup, "tag")
        text, version = "The version of the weights that serve.", {"version": state.weight_version}
        yield InfoMetricFamily(CONTROL_PREFIX + "weight_version", text, version)


def _gauge(name: str, text: str, rows: Rows, *labels: str) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, number in rows:
        family.add_metric(values, number)
    return family


def _stalls(of_replicas: Sequence[Mapping[str, StallCounts]]) -> Iterator[tuple[str, BucketCounts]]:
    """Merge the stalls of all replicas, by operation."""
    for operation in sorted({name for stalls in of_replicas for name in stalls}):
        found = [stalls[operation] for stalls in of_replicas if operation in stalls]
        counts = map(sum, zip(*(one.counts for one in found), strict=True))
        yield operation, BucketCounts(STALL_BOUNDS_S, counts, sum(one.sum_s for one in found))


def _sleep_state(state: StateReport) -> str:
    """vLLM's name of the state, which depends on the weights only."""
    reports = [rank.tags[MemoryTag.WEIGHTS] for rank in state.ranks]
    if all(report.state == "resident" for report in reports):
        return SLEEP_STATES[0]
    return SLEEP_STATES[1] if all(report.backup_bytes for report in reports) else SLEEP_STATES[2]


def _sample_key(name: str, labels: Mapping[str, str]) -> str:
    """Format `name{label="value"}`, with values escaped as in the text format."""
    if not labels:
        return name
    escapes = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
    pairs = (f'{label}="{value.translate(escapes)}"' for label, value in sorted(labels.items()))
    return f"{name}{{{','.join(pairs)}}}"
