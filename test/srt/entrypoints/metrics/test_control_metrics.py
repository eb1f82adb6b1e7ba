"""Metrics of control operations: over HTTP by what was done, and the lag of tokens by what was committed."""

import asyncio
import gc
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fixtures.application import Client
from fixtures.scripted_engine import NO_PAUSE, STATE, replica_load, updated
from fixtures.servers import Server, null_server
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from ebbtide.srt.entrypoints.metrics.collectors import GcPauses
from ebbtide.srt.entrypoints.metrics.prometheus import MAX_ADAPTERS, OTHER_ADAPTERS, Metrics
from ebbtide.srt.errors import EngineError, RequestRejected
from ebbtide.srt.managers.io_struct import Load, Reply, StallCounts, UpdateWeightVersionReqOutput
from ebbtide.testing.null_engine import NullEngine

# A null engine's tags; see `ebbtide.testing.NullDevice`.
KV_BYTES, WEIGHT_BYTES = 5000, 2000
# It goes on until it is aborted.
LONG = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 500_000}, "stream": True}

LOAD = replica_load(
    0,
    max_total_num_tokens=64,
    num_waiting_reqs=3,
    num_held_reqs=1,
    step_counts=[1, 1, 1, *[0] * 11],
    step_tokens=30,
)
ENDED = {
    "prompt_tokens": 1,
    "cached_tokens": 1,
    "completion_tokens": 3,
    "queue_time": 0.5,
    "first_token_latency": 1,
    "e2e_latency": 3,
    "num_retractions": 1,
    "num_nonfinite": 0,
    "weight_versions": [],
    "finish_reason": {"type": "stop"},
}
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    flags = ["--enable-metrics", "--weight-version", "0", "--incremental-streaming-output"]
    flags += ["--context-length", "600000", "--max-total-tokens", "600000"]
    with null_server(*flags) as server:
        yield server


def scraped(server: Server) -> Callable[..., float | None]:
    """One scrape, as a function from the name and labels of a sample to its value; None if there is none."""
    samples: Samples = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(server.get("/metrics").text)
        for sample in family.samples
    }
    return lambda name, **labels: samples.get((f"ebbtide_{name}", frozenset(labels.items())))


def test_each_operation_is_counted_by_its_outcome_and_effect(server: Server) -> None:
    before = scraped(server)
    with server.client.stream("POST", "/generate", json=LONG) as response:
        events = (line.removeprefix("data: ") for line in response.iter_lines() if line)
        next(events)
        assert server.post("/pause_generation", {"mode": "retract"}).json()["num_retracted"] == 1
        assert scraped(server)("not_running", reason="paused_retract") == 1
        update = {"model_path": "5", "weight_version": "1"}
        stall_ms = server.post("/update_weights_from_disk", update).json()["stall_ms"]
        assert server.post("/end_weight_update").status_code == 409
        assert server.post("/update_weights_from_disk", {}).status_code == 400
        steps = [{"op": "release", "tags": ["kv_cache"]}, {"op": "resume"}, {"op": "continue"}]
        assert server.post("/transition", {"steps": steps}).is_success
        metas = (json.loads(event)["meta_info"] for event in events if event != "[DONE]")
        next(meta for meta in metas if len(meta["weight_versions"]) == 2)
        assert scraped(server)("recomputed_tokens_total", dp_rank="0", cause="pause") >= 2
        assert server.post("/abort_request", {"abort_all": True, "report": True}).json()["num_aborted"] == 1
        assert list(metas)
    after = scraped(server)

    def ended(operation: str, outcome: str = "done", status: str = "200") -> float | None:
        return after("control_operations_total", operation=operation, outcome=outcome, status=status)

    done = ["pause_generation", "update_weights_from_disk", "release_memory_occupation", "transition"]
    done += ["resume_memory_occupation", "continue_generation", "abort_request"]
    assert [ended(operation) for operation in done] == [1] * len(done)
    assert ended("end_weight_update", "refused", "409") == 1
    assert ended("update_weights_from_disk", "refused", "400") == 1
    assert after("control_operation_duration_seconds_count", operation="update_weights_from_disk") == 2
    assert after("control_operations_in_progress", operation="update_weights_from_disk") == 0
    assert after("weight_update_stall_seconds_sum", operation="update_weights_from_disk") == stall_ms / 1e3
    assert 0 < after("control_operation_stall_seconds_sum", operation="update_weights_from_disk") < 60
    assert after("control_operation_stall_seconds_count", operation="update_weights_from_disk") == 1
    assert after("recomputed_tokens_total", dp_rank="0", cause="release") == 0
    assert after("scheduler_gc_pause_seconds_total", dp_rank="0") is not None
    assert after("weight_commits_total") == 1
    assert after("released_bytes_total", tag="kv_cache") == KV_BYTES
    assert after("resumed_bytes_total", tag="kv_cache") == KV_BYTES
    assert after("released_bytes_total", tag="weights") == 0
    assert after("control_affected_requests_total", operation="pause_generation", effect="retracted") == 1
    assert after("control_affected_requests_total", operation="abort_request", effect="aborted") == 1
    assert after("not_running", reason="paused_retract") == 0
    assert after("not_running", reason="kv_cache_released") == 0
    assert before("weight_version_info", version="0") == after("weight_version_info", version="1") == 1
    # One version at a time: a run of weeks leaves no series for each of its commits.
    assert after("weight_version_info", version="0") is None


def test_bytes_of_a_session_are_counted_once_and_its_commit_at_its_end(server: Server) -> None:
    before = scraped(server)
    server.post("/begin_weight_update")
    num_bytes = server.post("/update_weights_from_disk", {"model_path": "6"}).json()["num_bytes"]
    assert scraped(server)("weight_session_open") == 1
    assert server.post("/end_weight_update", {"weight_version": "2"}).json()["committed"]
    after = scraped(server)
    staged = {"operation": "update_weights_from_disk", "placement": "staged"}
    assert (
        after("weight_update_bytes_total", **staged) - before("weight_update_bytes_total", **staged)
        == num_bytes
    )
    assert after("weight_commits_total") - before("weight_commits_total") == 1
    assert after("weight_update_stall_seconds_count", operation="end_weight_update") == 1


def test_an_engine_in_python_has_the_same_samples_and_logs_what_was_done(
    caplog: pytest.LogCaptureFixture,
) -> None:
    callbacks = list(gc.callbacks)
    with NullEngine(weight_version='a "b"') as engine, caplog.at_level("INFO", "ebbtide.srt.entrypoints"):
        engine.generate(input_ids=[1], sampling_params={"max_new_tokens": 3})
        for chunk in engine.generate(input_ids=[1], sampling_params={"max_new_tokens": 3}, stream=True):
            assert chunk["output_ids"]
        for is_stream in (False, True):
            body = {"prompt": [1], "max_tokens": 3, "stream": is_stream}
            assert Client(engine).send("POST", "/v1/completions", body).is_success
        engine.release_memory_occupation(["weights"])
        with pytest.raises(RequestRejected, match="begin_weight_update first"):
            engine.end_weight_update()
        values = engine.metrics()
        assert len(gc.callbacks) == len(callbacks) + 1
    assert values['ebbtide:num_requests_total{finish_reason="length"}'] == 4
    assert values['ebbtide_output_token_lag_commits_bucket{le="0.0"}'] == 12
    assert values['ebbtide_released_bytes_total{tag="weights"}'] == WEIGHT_BYTES
    assert values['ebbtide_not_running{reason="weights_released"}'] == 1
    assert values[r'ebbtide_weight_version_info{version="a \"b\""}'] == 1
    assert gc.callbacks == callbacks
    released, refused = caplog.messages
    assert released.startswith("Released weights. ms=")
    assert refused.startswith("end_weight_update is refused (409): no weight update session is open")


# ------------------------------------------------------------------------------------ without an engine


class Observed:
    """Metrics that are driven by hand, from version 0 on."""

    def __init__(self) -> None:
        self.metrics = Metrics("0")
        self.loads: list[Load] = []

    def end(self, operation: str, result: Reply | BaseException) -> None:
        """The operation ends so."""

        async def work() -> Reply:
            if isinstance(result, BaseException):
                raise result
            return result

        asyncio.run(self.metrics.control.observed(operation, work()))

    def value(self, name: str, **labels: str) -> float | None:
        named = ",".join(f'{label}="{value}"' for label, value in sorted(labels.items()))
        values = self.metrics.values(STATE, self.loads, NO_PAUSE)
        return values.get(f"ebbtide_{name}" + (f"{{{named}}}" if labels else ""))


def spans(*lengths: tuple[str, int]) -> list[dict[str, Any]]:
    ends = [sum(length for _, length in lengths[: place + 1]) for place in range(len(lengths))]
    return [
        {"version": version, "start": end - length, "end": end}
        for (version, length), end in zip(lengths, ends, strict=True)
    ]


def test_the_lag_of_a_token_is_in_commits_since_its_version() -> None:
    observed = Observed()
    for version in ("1", "2", "3"):
        observed.end("update_weights_from_disk", updated(version))
    # The same weights under another name are no commit; and the last version is not known here yet.
    observed.end("update_weight_version", UpdateWeightVersionReqOutput(new_version="3b"))
    observed.metrics.control.note_spans(spans(("0", 5), ("2", 3), ("3b", 2), ("4", 1)))
    observed.metrics.control.note_spans(spans(("3", 7)))
    up_to = [observed.value("output_token_lag_commits_bucket", le=f"{lag}.0") for lag in range(4)]
    assert up_to == [10, 13, 13, 18]
    assert observed.value("output_token_lag_commits_sum") == 5 * 3 + 3 * 1
    assert observed.value("mixed_version_outputs_total") == 1


def test_what_replicas_have_counted_rises_and_kv_is_told_by_its_lag() -> None:
    observed = Observed()
    for version in ("1", "2", "3", "4"):
        observed.end("update_weights_from_disk", updated(version))
    kv = {"0": 1, "1": 2, "3": 4, "4": 8}
    stalls = {"pause_generation": StallCounts(counts=[1] + [0] * 13 + [2], sum_s=80.0)}
    for total in (5, 7):
        observed.loads = [
            replica_load(rank, kv_tokens=kv, stalls=stalls, recomputed_tokens={"update": total})
            for rank in range(2)
        ]
    by_lag = [observed.value("kv_tokens", dp_rank="1", commits=lag) for lag in ("0", "1", "2", "3 or more")]
    assert by_lag == [8, 4, 0, 3]
    assert observed.value("recomputed_tokens_total", dp_rank="1", cause="update") == 7
    name, labels = "control_operation_stall_seconds", {"operation": "pause_generation"}
    bounds = [observed.value(f"{name}_bucket", **labels, le=bound) for bound in ("0.001", "30.0", "+Inf")]
    assert bounds == [2, 2, 6]
    assert observed.value(f"{name}_sum", **labels) == 160


@pytest.mark.parametrize(
    ("error", "outcome", "status"),
    [
        (RequestRejected("no", 409), "refused", "409"),
        (EngineError("it broke"), "failed", "500"),
        (asyncio.CancelledError(), "abandoned", "499"),
    ],
)
def test_what_does_not_succeed_is_raised_and_counted(error: BaseException, outcome: str, status: str) -> None:
    observed = Observed()
    with pytest.raises(type(error)):
        observed.end("update_weights_from_tensor", error)
    labels = {"operation": "update_weights_from_tensor", "outcome": outcome, "status": status}
    assert observed.value("control_operations_total", **labels) == 1
    assert observed.value("control_operations_in_progress", operation="update_weights_from_tensor") == 0
    assert observed.value("weight_commits_total") == 0


def test_pauses_for_garbage_collection_are_counted_while_they_are_watched() -> None:
    registry, pauses = CollectorRegistry(), GcPauses("pauses")
    registry.register(pauses)

    def count() -> float | None:
        return registry.get_sample_value("pauses_count", {"generation": "2"})

    pauses.start()
    gc.collect()
    pauses.stop()
    counted = count()
    gc.collect()
    assert counted == count() == 1


@pytest.mark.parametrize(
    ("dialect", "has", "has_not"),
    [
        (None, [], ["sglang:", "vllm:"]),
        (
            "sglang",
            [
                "sglang:num_requests_total{",
                'sglang:num_paused_reqs{dp_rank="0"} ',
                "sglang:prompt_tokens_histogram_sum 1.0",
                "sglang:generation_tokens_histogram_sum 3.0",
            ],
            ["vllm:"],
        ),
        (
            "vllm",
            [
                'vllm:rl_weight_update_operation_duration_seconds_count{operation="update"} 2.0',
                'vllm:rl_weight_update_operation_duration_seconds_bucket{le="600.0",operation="finish"} 0.0',
                'vllm:rl_weight_update_operations_in_flight{operation="start"} 0.0',
                'vllm:sleep_mode_operation_duration_seconds_count{operation="wake"} 0.0',
                'vllm:rl_weight_update_operation_duration_seconds_sum{operation="start_draft"} 0.0',
                'vllm:prefix_cache_hits_total{engine="0",model_name="tiny"} 1.0',
                'vllm:request_success_total{engine="0",finished_reason="stop",model_name="tiny"} 1.0',
                'vllm:inter_token_latency_seconds_sum{engine="0",model_name="tiny"} 2.0',
                'vllm:request_inference_time_seconds_sum{engine="0",model_name="tiny"} 2.5',
                'vllm:request_prefill_time_seconds_sum{engine="0",model_name="tiny"} 0.5',
                'vllm:request_decode_time_seconds_sum{engine="0",model_name="tiny"} 2.0',
                'vllm:request_time_per_output_token_seconds_sum{engine="0",model_name="tiny"} 1.0',
                'vllm:request_prompt_tokens_sum{engine="0",model_name="tiny"} 1.0',
                'vllm:iteration_tokens_total_bucket{engine="0",le="8.0",model_name="tiny"} 2.0',
                'vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 2.0',
                'vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="deferred"} 1.0',
                'vllm:request_params_max_tokens_sum{engine="0",model_name="tiny"} 96.0',
                'vllm:engine_sleep_state{engine="0",model_name="tiny",sleep_state="awake"} 1.0',
                'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="4"} 1.0',
            ],
            ["sglang:", 'vllm:rl_weight_update_operation_duration_seconds_bucket{le="0.005"'],
        ),
    ],
)
def test_the_names_of_other_engines(dialect: str | None, has: list[str], has_not: list[str]) -> None:
    metrics = Metrics("0", dialect, model_name="tiny", page_size=16)
    for operation in ("update_weights_from_tensor", "update_weights_from_disk"):
        ended = asyncio.sleep(0, updated("1"))
        asyncio.run(metrics.control.observed(operation, ended))
    metrics.note(ENDED)
    metrics.note_taken(4, 96)
    text = metrics.text(STATE, [LOAD], NO_PAUSE).decode()
    for line in has:
        assert line in text
    for line in has_not:
        assert line not in text


def test_the_loop_goes_on_while_the_outputs_of_a_large_answer_are_counted() -> None:
    names = ("prompt_tokens", "cached_tokens", "completion_tokens", "num_retractions", "num_nonfinite")
    times = ("queue_time", "first_token_latency", "e2e_latency")
    meta: dict[str, Any] = dict.fromkeys((*names, *times), 0)
    output = {"meta_info": {**meta, "finish_reason": {"type": "stop"}, "weight_versions": []}}

    async def turns_while_counting(num_outputs: int) -> int:
        turns, metrics = 0, Metrics("0")
        counting = asyncio.create_task(metrics.note_all([output] * num_outputs))
        while not counting.done():
            await asyncio.sleep(0)
            turns += 1
        counted = metrics.values(STATE, [LOAD], NO_PAUSE)
        assert counted['ebbtide:num_requests_total{finish_reason="stop"}'] == num_outputs
        return turns

    few, many = (asyncio.run(turns_while_counting(number)) for number in (1, 2000))
    assert many > few + 5


def test_adapters_beyond_the_first_share_a_label() -> None:
    metrics = Metrics("0")
    for number in [*range(MAX_ADAPTERS + 5), 0]:
        metrics.note({**ENDED, "lora_name": f"adapter-{number}"})
    text = metrics.text(STATE, [], NO_PAUSE).decode()
    counted = re.findall(r'adapter_generation_tokens_total\{adapter="(.+?)"\} (\S+)', text)
    assert len(counted) == MAX_ADAPTERS + 1
    assert dict(counted)["adapter-0"] == "6.0"
    assert dict(counted)[OTHER_ADAPTERS] == "15.0"
