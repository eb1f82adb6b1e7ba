"""Traces, over the SDK's exporter that keeps them in memory."""

import asyncio
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from fixtures.scripted_engine import updated
from msgspec import structs
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.testclient import TestClient

from ebbtide.srt.entrypoints.metrics.observers import TraceContext, Tracing, open_tracing
from ebbtide.srt.entrypoints.metrics.operations import EndedOperation
from ebbtide.srt.errors import ConfigurationError
from ebbtide.srt.server_args import ServerArgs
from ebbtide.testing.null_engine import NullEngine

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
TRACEPARENT = f"00-{TRACE_ID}-00f067aa0ba902b7-01"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracing(exporter: InMemorySpanExporter) -> Iterator[Tracing]:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing = Tracing(provider)
    yield tracing
    tracing.close()


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


def attributes(span: ReadableSpan) -> dict[str, Any]:
    assert span.attributes is not None
    return dict(span.attributes)


def test_operations_and_outputs_are_spans_and_the_steps_of_a_transition_its_children(
    monkeypatch: pytest.MonkeyPatch, tracing: Tracing, exporter: InMemorySpanExporter
) -> None:
    monkeypatch.setattr("ebbtide.srt.entrypoints.service.open_tracing", lambda args: tracing)
    with NullEngine() as engine:
        answer = engine.generate(input_ids=[1], sampling_params={"max_new_tokens": 40})
        engine.transition([{"op": "pause", "mode": "in_place"}, {"op": "continue"}])
        engine.update_weight_version("2")
        with pytest.raises(Exception, match="no_such_tag"):
            engine.release_memory_occupation(tags=["no_such_tag"])

    spans = by_name(exporter)
    transition = spans["transition"].get_span_context()
    for step in ("pause_generation", "continue_generation"):
        parent = spans[step].parent
        assert parent is not None
        assert parent.span_id == transition.span_id
    assert attributes(spans["pause_generation"])["ebbtide.mode"] == "in_place"
    assert spans["update_weight_version"].parent is None
    refused = spans["release_memory_occupation"]
    assert attributes(refused)["ebbtide.outcome"] == "refused"
    assert "no_such_tag" in str(refused.status.description)
    output = attributes(spans["generate"])
    assert output["gen_ai.response.id"] == answer["meta_info"]["id"]
    assert output["gen_ai.usage.output_tokens"] == 40


def test_an_output_has_the_parent_that_its_request_names_and_is_linked_to_the_updates_that_hit_it(
    tracing: Tracing, exporter: InMemorySpanExporter
) -> None:
    async def endpoint(request: Request) -> Response:
        await asyncio.sleep(0)
        tracing.note_output(
            {
                "id": "r",
                "prompt_tokens": 1,
                "completion_tokens": 2,
                "cached_tokens": 0,
                "finish_reason": {"type": "stop"},
                "num_retractions": 0,
                "weight_versions": [{"version": "1"}, {"version": "2"}],
                "e2e_latency": 1.5,
                "first_token_latency": 0.5,
            }
        )
        return Response()

    for version in ("1", "2"):
        reply = structs.replace(updated(version), stages_ms={"decode": 200.0, "commit": 100.0})
        tracing.begin(f"update to {version}")(EndedOperation("update", 1.0, 0.5, "done", "", reply))
    app = Starlette()
    app.add_route("/generate", endpoint, methods=["POST"])
    app.add_middleware(TraceContext, tracing=lambda: tracing)
    answer = TestClient(app).post("/generate", headers={"traceparent": TRACEPARENT})
    spans = by_name(exporter)
    span, served, update = spans["generate"], spans["POST /generate"], spans["update to 2"]
    own = served.get_span_context()
    assert answer.headers["traceresponse"] == f"00-{TRACE_ID}-{own.span_id:016x}-01"
    assert served.parent is not None
    assert f"{served.parent.span_id:016x}" == TRACEPARENT.split("-")[2]
    assert span.parent == own
    stages = [spans["decode"], spans["commit"]]
    assert [stage.parent for stage in stages] == [update.get_span_context()] * 2
    assert stages[0].end_time == stages[1].start_time
    assert [link.context for link in span.links] == [spans["update to 2"].get_span_context()]
    assert f"{span.get_span_context().trace_id:032x}" == TRACE_ID
    [first] = span.events
    assert span.start_time is not None
    assert span.end_time is not None
    assert span.end_time - span.start_time == 1_500_000_000
    assert first.timestamp - span.start_time == 500_000_000


def test_without_the_libraries_the_flag_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_tracing(ServerArgs(model_path="m")) is None
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigurationError, match=r"ebbtide\[otel\]"):
        open_tracing(ServerArgs(model_path="m", enable_trace=True))
