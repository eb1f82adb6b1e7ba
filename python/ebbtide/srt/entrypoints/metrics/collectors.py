"""Collectors that prometheus-client lacks: weighted histograms, GC pauses, other engines' names."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Final

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from ebbtide.srt.this_process import GcClock

# In seconds: collecting a young generation takes microseconds, a full collection of a large heap seconds.
GC_BUCKETS_S: Final = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0)
NUM_GENERATIONS: Final = 3


class BucketCounts:
    """Counts values in buckets, without a lock. The last bucket has values larger than all `bounds`."""

    def __init__(self, bounds: Sequence[float], counts: Iterable[int] = (), total: float = 0.0) -> None:
        self.sum = total
        self._bounds = bounds
        self._counts = list(counts) or [0] * (len(bounds) + 1)

    def add(self, value: float, count: int = 1) -> None:
        """Count a value `count` times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self.sum += value * count

    def cumulative(self) -> list[tuple[str, float]]:
        """Pairs of each bound, as text, and the number of values up to it."""
        names = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        return list(zip(names, accumulate(self._counts), strict=True))


def histograms(
    name: str, help_text: str, label: str, rows: Iterable[tuple[str, BucketCounts]]
) -> HistogramMetricFamily:
    """Make a family of histograms from counts. `rows`: value of the label, and the counts."""
    family = HistogramMetricFamily(name, help_text, labels=[label])
    for value, counts in rows:
        family.add_metric([value], counts.cumulative(), counts.sum)
    return family


class WeightedHistogram(Collector):
    """A histogram that can count a value many times at once."""

    def __init__(self, name: str, help_text: str, bounds: Sequence[float]) -> None:
        self._name, self._help_text = name, help_text
        self._counts = BucketCounts(bounds)
        self.observe = self._counts.add

    def collect(self) -> Iterable[HistogramMetricFamily]:
        buckets = self._counts.cumulative()
        yield HistogramMetricFamily(self._name, self._help_text, buckets=buckets, sum_value=self._counts.sum)


class GcPauses(GcClock, Collector):
    """Histograms of this process's pauses by Python's garbage collector, between `start` and `stop`.

    A `Histogram` of prometheus-client would deadlock if the garbage collector ran while it holds its lock.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self._counts = [BucketCounts(GC_BUCKETS_S) for _ in range(NUM_GENERATIONS)]

    def add(self, generation: int, pause_s: float) -> None:
        self._counts[generation].add(pause_s)

    def collect(self) -> Iterable[HistogramMetricFamily]:
        help_text = "Pauses of the API process by Python's garbage collector."
        rows = ((str(generation), counts) for generation, counts in enumerate(self._counts))
        yield histograms(self._name, help_text, "generation", rows)


SGLANG: Final = {
    **{
        f"ebbtide:{name}": f"sglang:{name}"
        for name in (
            *("num_running_reqs", "num_paused_reqs", "num_used_tokens", "max_total_num_tokens"),
            *("token_usage", "gen_throughput", "cache_hit_rate", "num_requests", "queue_time_seconds"),
            *("prompt_tokens", "cached_tokens", "generation_tokens", "e2e_request_latency_seconds"),
            *("time_to_first_token_seconds", "inter_token_latency_seconds"),
        )
    },
    "ebbtide:num_waiting_reqs": "sglang:num_queue_reqs",
    "ebbtide:output_prompt_tokens": "sglang:prompt_tokens_histogram",
    "ebbtide:output_generation_tokens": "sglang:generation_tokens_histogram",
}
VLLM: Final[Mapping[str, tuple[str, ...]]] = {
    "ebbtide:num_running_reqs": ("vllm:num_requests_running",),
    "ebbtide:num_waiting_reqs": ("vllm:num_requests_waiting",),
    "ebbtide:token_usage": ("vllm:kv_cache_usage_perc",),
    "ebbtide:prompt_tokens": ("vllm:prompt_tokens", "vllm:prefix_cache_queries"),
    "ebbtide:cached_tokens": ("vllm:prefix_cache_hits",),
    "ebbtide:generation_tokens": ("vllm:generation_tokens",),
    "ebbtide:num_requests": ("vllm:request_success",),
    "ebbtide:num_retractions": ("vllm:num_preemptions",),
    "ebbtide:e2e_request_latency_seconds": ("vllm:e2e_request_latency_seconds",),
    "ebbtide:time_to_first_token_seconds": ("vllm:time_to_first_token_seconds",),
    "ebbtide:inter_token_latency_seconds": ("vllm:inter_token_latency_seconds",),
    "ebbtide:queue_time_seconds": ("vllm:request_queue_time_seconds",),
    "ebbtide:inference_seconds": ("vllm:request_inference_time_seconds",),
    "ebbtide:prefill_seconds": ("vllm:request_prefill_time_seconds",),
    "ebbtide:decode_seconds": ("vllm:request_decode_time_seconds",),
    "ebbtide:time_per_output_token_seconds": ("vllm:request_time_per_output_token_seconds",),
    "ebbtide:output_prompt_tokens": ("vllm:request_prompt_tokens",),
    "ebbtide:output_generation_tokens": ("vllm:request_generation_tokens",),
    "ebbtide:output_retractions": ("vllm:request_num_preemptions",),
    "ebbtide:num_waiting_reqs_by_reason": ("vllm:num_requests_waiting_by_reason",),
    "ebbtide:step_tokens": ("vllm:iteration_tokens_total",),
    "ebbtide:request_params_n": ("vllm:request_params_n",),
    "ebbtide:request_params_max_tokens": ("vllm:request_params_max_tokens",),
}
# Our label → vLLM's.
VLLM_LABELS: Final = {"dp_rank": "engine", "finish_reason": "finished_reason"}
DURATION: Final = "ebbtide_control_operation_duration_seconds"
IN_PROGRESS: Final = "ebbtide_control_operations_in_progress"
# vLLM's metric family → our operation → vLLM's name of it. Source: wire_vllm section 1.
VLLM_OPERATIONS: Final = {
    "rl_weight_update": {
        "init_weights_update_group": "init",
        "destroy_weights_update_group": "shutdown",
        "begin_weight_update": "start",
        "update_weights_from_tensor": "update",
        "update_weights_from_distributed": "update",
        "update_weights_from_ipc": "update",
        "update_weights_from_disk": "update",
        "end_weight_update": "finish",
    },
    "sleep_mode": {"release_memory_occupation": "sleep", "resume_memory_occupation": "wake"},
}
# Operations that do not exist here. Dashboards expect their rows, which are zero.
VLLM_ABSENT: Final = {"rl_weight_update": "start_draft", "sleep_mode": "release_kv_cache_memory"}
SLEEP_STATES: Final = ("awake", "weights_offloaded", "discard_all")
VLLM_BUCKETS: Final = frozenset(
    ("0.01", "0.1", "1.0", "10.0", "30.0", "60.0", "120.0", "300.0", "600.0", "+Inf")
)


class SglangAliases(Collector):
    """Metric families of a registry under SGLang's names."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            if family.name in SGLANG:
                yield _renamed(family, SGLANG[family.name], family.samples)


class VllmAliases(Collector):
    """Metric families of a registry under vLLM's names, and families that only vLLM has.

    `sleep_state`: one of `SLEEP_STATES`. `num_tokens`: dp_rank → tokens in the replica's KV pool.
    """

    def __init__(self, registry: CollectorRegistry, model_name: str, page_size: int) -> None:
        self._registry = registry
        self._model = {"model_name": model_name}
        self._page_size = page_size
        self.sleep_state = SLEEP_STATES[0]
        self.num_tokens: Mapping[int, int] = {}

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            for name in VLLM.get(family.name, ()):
                samples = (sample._replace(labels=self._labels(sample.labels)) for sample in family.samples)
                yield _renamed(family, name, samples)
            if family.name in (DURATION, IN_PROGRESS):
                suffix = "operation_duration_seconds" if family.name == DURATION else "operations_in_flight"
                for group, operations in VLLM_OPERATIONS.items():
                    rows = _by_operation(family, operations, VLLM_ABSENT[group])
                    yield _renamed(family, f"vllm:{group}_{suffix}", rows)
        state = GaugeMetricFamily(
            "vllm:engine_sleep_state",
            "1 for the current state.",
            labels=["engine", "sleep_state", "model_name"],
        )
        for one in SLEEP_STATES:
            state.add_metric(["0", one, self._model["model_name"]], one == self.sleep_state)
        yield state
        cache = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Pages of each replica's KV pool, and tokens per page.",
            labels=["engine", "num_gpu_blocks", "block_size"],
        )
        for rank, count in self.num_tokens.items():
            cache.add_metric([str(rank), str(count // self._page_size), str(self._page_size)], 1)
        yield cache

    def _labels(self, labels: Mapping[str, str]) -> dict[str, str]:
        named = {VLLM_LABELS.get(name, name): value for name, value in labels.items()}
        return {"engine": "0", **named, **self._model}


def _renamed(family: Metric, name: str, samples: Iterable[Sample]) -> Metric:
    alias = Metric(name, family.documentation, family.type)
    alias.samples = [sample._replace(name=name + sample.name[len(family.name) :]) for sample in samples]
    return alias


def _by_operation(family: Metric, operations: Mapping[str, str], absent: str) -> list[Sample]:
    """The samples of these operations with vLLM's names and buckets. Operations with one name are summed.

    `absent`: an operation that does not exist here, with samples of 0.
    """
    sums: dict[tuple[str, str, str | None], float] = {}
    for sample in family.samples:
        operation, bound = operations.get(sample.labels["operation"]), sample.labels.get("le")
        if (
            operation is None
            or not (bound is None or bound in VLLM_BUCKETS)
            or sample.name.endswith("_created")
        ):
            continue
        key = (sample.name, operation, bound)
        sums[key] = sums.get(key, 0.0) + sample.value
        sums[sample.name, absent, bound] = 0.0
    return [
        Sample(name, {"operation": operation} | ({} if bound is None else {"le": bound}), value)
        for (name, operation, bound), value in sums.items()
    ]
