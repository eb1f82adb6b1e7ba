"""Traces of control operations and of generations, by OpenTelemetry's SDK (the extra `otel`)."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ebbtide.srt.entrypoints.metrics.operations import EndedOperation, Ending
from ebbtide.srt.errors import ConfigurationError
from ebbtide.srt.managers import io_struct
from ebbtide.srt.server_args import ServerArgs

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, SpanContext

# How many commits back an output can be linked to the update that hit it.
MAX_COMMITS: Final = 1024


class Tracing:
    """An observer that makes a span of every control operation and of every output.

    A span's parent is the context of whoever asked: the caller's own in Python, over HTTP that of the span of
    the request (`TraceContext`); the steps of a transition, and the stages of an update, are children of its
    span. An output is linked to the updates that were committed while it was generated. `provider`: makes the
    spans; ended by `close`.
    """

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("ebbtide")
        self._commits: OrderedDict[str, SpanContext] = OrderedDict()

    def begin(self, operation: str) -> Ending:
        """Start the span of a control operation; returns what ends it."""
        from opentelemetry import context, trace

        span = self._tracer.start_span(operation)
        token = context.attach(trace.set_span_in_context(span))

        def end(ended: EndedOperation) -> None:
            context.detach(token)
            span.set_attributes({"ebbtide.outcome": ended.outcome, **_told(ended.reply)})
            if ended.outcome != "done":
                span.set_status(trace.StatusCode.ERROR, ended.message)
            reply = ended.reply
            if isinstance(reply, io_struct.UpdateWeightsReqOutput) and reply.committed:
                self._commits[reply.weight_version] = span.get_span_context()
                if len(self._commits) > MAX_COMMITS:
                    self._commits.popitem(last=False)
            if isinstance(reply, io_struct.UpdateWeightsReqOutput):
                self._note_stages(span, reply)
            span.end()

        return end

    def _note_stages(self, span: Span, reply: io_struct.UpdateWeightsReqOutput) -> None:
        """A span for each stage of an update. The reply has just followed the last one."""
        from opentelemetry import trace

        parent = trace.set_span_in_context(span)
        start_ns = time.time_ns() - int(1e6 * sum(reply.stages_ms.values()))
        for name, took_ms in reply.stages_ms.items():
            stage = self._tracer.start_span(name, context=parent, start_time=start_ns)
            start_ns += int(1e6 * took_ms)
            stage.end(end_time=start_ns)

    def note_output(self, meta: Mapping[str, Any]) -> None:
        """An output has ended: its `meta_info`."""
        from opentelemetry.trace import Link

        ended_ns = time.time_ns()
        started_ns = ended_ns - int(meta["e2e_latency"] * 1e9)
        versions = [span["version"] for span in meta["weight_versions"]]
        hits = [self._commits[version] for version in versions[1:] if version in self._commits]
        span = self._tracer.start_span(
            "generate",
            start_time=started_ns,
            links=[Link(hit) for hit in hits],
            attributes={
                "gen_ai.response.id": meta["id"],
                "gen_ai.usage.input_tokens": meta["prompt_tokens"],
                "gen_ai.usage.output_tokens": meta["completion_tokens"],
                "gen_ai.response.finish_reasons": [meta["finish_reason"]["type"]],
                "ebbtide.cached_tokens": meta["cached_tokens"],
                "ebbtide.num_retractions": meta["num_retractions"],
                "ebbtide.weight_versions": versions,
            },
        )
        span.add_event("first token", timestamp=started_ns + int(meta["first_token_latency"] * 1e9))
        span.end(end_time=ended_ns)

    def serve(self, scope: Scope) -> Span:
        """Start the span of an HTTP request."""
        from opentelemetry import propagate, trace

        attributes = {"http.request.method": scope["method"], "url.path": scope["path"]}
        return self._tracer.start_span(
            f"{scope['method']} {scope['path']}",
            context=propagate.extract(Headers(scope=scope)),
            kind=trace.SpanKind.SERVER,
            attributes=attributes,
        )

    def close(self) -> None:
        """Export what has not been exported yet."""
        self._provider.shutdown()


class TraceContext:
    """Makes a span of each request that asks for something, the parent of what is done for it.

    Its own parent is the `traceparent` that the request brings; the answer tells of the span in
    `traceresponse`. Source: W3C Trace Context, and its draft of headers of responses. `tracing`: asked with
    each request: the application may be built before it has an engine.
    """

    def __init__(self, app: ASGIApp, tracing: Callable[[], Tracing | None]) -> None:
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tracing = self._tracing()
        # Probes and scrapes come every few seconds: nobody looks for them.
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS") or tracing is None:
            await self._app(scope, receive, send)
            return
        from opentelemetry import context, trace

        span = tracing.serve(scope)

        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["traceresponse"] = _traceparent(span)
                span.set_attribute("http.response.status_code", message["status"])
                if message["status"] >= HTTPStatus.INTERNAL_SERVER_ERROR:
                    span.set_status(trace.StatusCode.ERROR)
            await send(message)

        token = context.attach(trace.set_span_in_context(span))
        try:
            await self._app(scope, receive, tell)
        finally:
            context.detach(token)
            span.end()


def open_tracing(args: ServerArgs) -> Tracing | None:
    """Tracing to the collector that the arguments name; None without `--enable-trace`."""
    if not args.enable_trace:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigurationError(
            f"--enable-trace needs OpenTelemetry's SDK: pip install 'ebbtide[otel]' ({error})"
        ) from None
    provider = TracerProvider(resource=Resource.create({"service.name": args.otlp_service_name}))
    exporter = OTLPSpanExporter(endpoint=args.otlp_traces_endpoint, insecure=True)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracing(provider)


def _traceparent(span: Span) -> str:
    """The span in the form of the header of that name."""
    of_span = span.get_span_context()
    return f"00-{of_span.trace_id:032x}-{of_span.span_id:016x}-{of_span.trace_flags:02x}"


def _told(reply: io_struct.Reply | None) -> dict[str, str | bool | int | float]:
    """What the reply says in numbers and words, its message apart."""
    if reply is None:
        return {}
    fields = ((name, getattr(reply, name)) for name in type(reply).__struct_fields__ if name != "message")
    return {f"ebbtide.{name}": value for name, value in fields if isinstance(value, str | bool | int | float)}
