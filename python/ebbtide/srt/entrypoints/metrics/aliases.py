"""The metrics once more under the names that SGLang's or vLLM's dashboards ask for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

SGLANG: Final = {
    "ebbtide:num_running_reqs": "sglang:num_running_reqs",
    "ebbtide:num_waiting_reqs": "sglang:num_queue_reqs",
    "ebbtide:num_used_tokens": "sglang:num_used_tokens",
    "ebbtide:max_total_num_tokens": "sglang:max_total_num_tokens",
    "ebbtide:token_usage": "sglang:token_usage",
    "ebbtide:gen_throughput": "sglang:gen_throughput",
    "ebbtide:cache_hit_rate": "sglang:cache_hit_rate",
    "ebbtide:prompt_tokens": "sglang:prompt_tokens",
    "ebbtide:cached_tokens": "sglang:cached_tokens",
    "ebbtide:generation_tokens": "sglang:generation_tokens",
    "ebbtide:num_requests": "sglang:num_requests",
    "ebbtide:e2e_request_latency_seconds": "sglang:e2e_request_latency_seconds",
    "ebbtide:time_to_first_token_seconds": "sglang:time_to_first_token_seconds",
    "ebbtide:queue_time_seconds": "sglang:queue_time_seconds",
}
VLLM: Final = {
    "ebbtide:num_running_reqs": "vllm:num_requests_running",
    "ebbtide:num_waiting_reqs": "vllm:num_requests_waiting",
    "ebbtide:token_usage": "vllm:kv_cache_usage_perc",
    "ebbtide:prompt_tokens": "vllm:prompt_tokens",
    "ebbtide:generation_tokens": "vllm:generation_tokens",
    "ebbtide:e2e_request_latency_seconds": "vllm:e2e_request_latency_seconds",
    "ebbtide:time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "ebbtide:queue_time_seconds": "vllm:request_queue_time_seconds",
}
DURATION: Final = "ebbtide_control_operation_duration_seconds"
IN_PROGRESS: Final = "ebbtide_control_operations_in_progress"
# What vLLM calls our operations, by the family that counts them. Source: wire_vllm section 1.
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
VLLM_BUCKETS: Final = frozenset(
    ("0.01", "0.1", "1.0", "10.0", "30.0", "60.0", "120.0", "300.0", "600.0", "+Inf")
)


class Aliases(Collector):
    """Families of a registry under other names.

    Args:
        dialect: sglang or vllm.
    """

    def __init__(self, registry: CollectorRegistry, dialect: str) -> None:
        self._registry = registry
        self._is_vllm = dialect == "vllm"

    def collect(self) -> Iterator[Metric]:
        names = VLLM if self._is_vllm else SGLANG
        for family in self._registry.collect():
            if family.name in names:
                yield _renamed(family, names[family.name], family.samples)
            elif self._is_vllm and family.name in (DURATION, IN_PROGRESS):
                suffix = "operation_duration_seconds" if family.name == DURATION else "operations_in_flight"
                for group, operations in VLLM_OPERATIONS.items():
                    yield _renamed(family, f"vllm:{group}_{suffix}", _by_operation(family, operations))


def _renamed(family: Metric, name: str, samples: Iterable[Sample]) -> Metric:
    alias = Metric(name, family.documentation, family.type)
    alias.samples = [sample._replace(name=name + sample.name[len(family.name) :]) for sample in samples]
    return alias


def _by_operation(family: Metric, operations: Mapping[str, str]) -> list[Sample]:
    """The samples of these operations, added up where several are one, in the buckets that vLLM has."""
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
    return [
        Sample(name, {"operation": operation} | ({} if bound is None else {"le": bound}), value)
        for (name, operation, bound), value in sums.items()
    ]
