"""Observers of control operations and outputs: the dashboard's timeline, and OpenTelemetry traces."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ebbtide.srt.entrypoints.metrics.operations import EndedOperation, Ending
from ebbtide.srt.errors import ConfigurationError, EngineError
from ebbtide.srt.managers import io_struct
from ebbtide.srt.server_args import ServerArgs

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, SpanContext

# How many past operations a new page shows. An hour of a training loop has a few hundred.
MAX_OPERATIONS: Final = 512
MAX_SAMPLES: Final = 1800
SAMPLE_INTERVAL_S: Final = 1.0
# How many of the newest versions a sample lists in `outputs_across`.
MAX_TOLD: Final = 8
# A viewer with this many unread events is dropped: it no longer reads, e.g. on a sleeping machine.
MAX_UNREAD: Final = 256
# Fields of replies that the page shows.
_REPLY_FIELDS: Final = (
    *("stall_ms", "num_bytes", "staged", "weight_version", "new_version"),
    *("num_retracted", "num_parked", "num_aborted", "freed_bytes", "mapped_bytes", "moved_bytes"),
)

Event = dict[str, Any]


class Timeline:
    """The recent history of an engine, and a stream of events for each page that shows it.

    Call all methods in one event loop. Without viewers, only control operations and outputs are recorded.

    `sample`: measures the fields of a sample, besides its time, tokens by version and outputs across. If it
    raises EngineError, that sample is skipped.
    """

    def __init__(self, sample: Callable[[], Awaitable[Mapping[str, Any]]]) -> None:
        self._sample = sample
        self._operations: deque[Event] = deque(maxlen=MAX_OPERATIONS)
        self._samples: deque[Event] = deque(maxlen=MAX_SAMPLES)
        self._tokens_by_version: Counter[str] = Counter()
        # Version → number of ended outputs during which it was committed; the last `MAX_OPERATIONS` versions.
        self._outputs_across: dict[str, int] = {}
        self._viewers: set[asyncio.Queue[Event | None]] = set()
        self._sampling: asyncio.Task[None] | None = None

    def begin(self, operation: str) -> Ending:
        """Note the start of a control operation. Returns a function to call at its end."""
        return self._note_ended

    def _note_ended(self, ended: EndedOperation) -> None:
        numbers = ((name, getattr(ended.reply, name, None)) for name in _REPLY_FIELDS)
        event: Event = {
            "operation": ended.operation,
            "started_s": ended.started_s,
            "duration_s": ended.duration_s,
            "outcome": ended.outcome,
            "message": ended.message,
            **{name: value for name, value in numbers if value},
        }
        self._operations.append(event)
        self._publish({"operation": event})

    def note_output(self, meta: Mapping[str, Any]) -> None:
        """Count the tokens of an ended output by their versions. `meta`: its `meta_info`."""
        for span in meta["weight_versions"]:
            self._tokens_by_version[span["version"]] += span["end"] - span["start"]
        for span in meta["weight_versions"][1:]:
            self._outputs_across[span["version"]] = self._outputs_across.pop(span["version"], 0) + 1
        while len(self._outputs_across) > MAX_OPERATIONS:
            del self._outputs_across[next(iter(self._outputs_across))]

    async def events(self) -> AsyncGenerator[Event]:
        """Yield the history as one event, then each new event. Ends at `close`, or for too slow a reader."""
        unread: asyncio.Queue[Event | None] = asyncio.Queue(MAX_UNREAD)
        self._viewers.add(unread)
        if self._sampling is None:
            # Samples count the tokens of a second, not all since the last viewer.
            self._tokens_by_version.clear()
            self._sampling = asyncio.create_task(self._keep_sampling())
        try:
            history = {"operations": list(self._operations), "samples": list(self._samples)}
            yield {"history": history | {"outputs_across": dict(self._outputs_across)}}
            while (event := await unread.get()) is not None:
                yield event
        finally:
            self._viewers.discard(unread)
            if not self._viewers:
                self._stop_sampling()

    def close(self) -> None:
        """End the streams of all viewers."""
        self._stop_sampling()
        for unread in list(self._viewers):
            self._end(unread)

    def _publish(self, event: Event) -> None:
        for unread in list(self._viewers):
            if unread.full():
                self._end(unread)
            else:
                unread.put_nowait(event)

    def _end(self, unread: asyncio.Queue[Event | None]) -> None:
        self._viewers.discard(unread)
        while not unread.empty():
            unread.get_nowait()
        unread.put_nowait(None)

    def _stop_sampling(self) -> None:
        if self._sampling is not None:
            self._sampling.cancel()
            self._sampling = None

    async def _keep_sampling(self) -> None:
        while True:
            # A rank may have died without its death being noticed yet.
            with suppress(EngineError):
                measured = await self._sample()
                tokens, self._tokens_by_version = dict(self._tokens_by_version), Counter()
                # Only the newest versions, since the counts of older ones hardly change.
                across = dict(list(self._outputs_across.items())[-MAX_TOLD:])
                sample: Event = {
                    "time_s": time.time(),
                    "tokens_by_version": tokens,
                    "outputs_across": across,
                    **measured,
                }
                self._samples.append(sample)
                self._publish({"sample": sample})
            await asyncio.sleep(SAMPLE_INTERVAL_S)


# How many commits are remembered, to link outputs to the updates during them.
MAX_COMMITS: Final = 1024


class Tracing:
    """An observer that makes a span for every control operation and every output.

    A span's parent is the caller's context: in Python the caller's own, over HTTP the span of the request
    (`TraceContext`). The steps of a transition and the stages of an update are children of its span. An
    output's span has links to the updates that were committed while it was generated.

    `provider`: makes the spans; `close` ends it.
    """

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("ebbtide")
        self._commits: OrderedDict[str, SpanContext] = OrderedDict()

    def begin(self, operation: str) -> Ending:
        """Start the span of a control operation. Returns a function that ends it."""
        from opentelemetry import context, trace

        span = self._tracer.start_span(operation)
        token = context.attach(trace.set_span_in_context(span))

        def end(ended: EndedOperation) -> None:
            context.detach(token)
            span.set_attributes({"ebbtide.outcome": ended.outcome, **_attributes(ended.reply)})
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
        """Make a span for each stage of an update, the last of which has just ended."""
        from opentelemetry import trace

        parent = trace.set_span_in_context(span)
        start_ns = time.time_ns() - int(1e6 * sum(reply.stages_ms.values()))
        for name, took_ms in reply.stages_ms.items():
            stage = self._tracer.start_span(name, context=parent, start_time=start_ns)
            start_ns += int(1e6 * took_ms)
            stage.end(end_time=start_ns)

    def note_output(self, meta: Mapping[str, Any]) -> None:
        """Make the span of an ended output. `meta`: its `meta_info`."""
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
        """Export the remaining spans, and end the provider."""
        self._provider.shutdown()


class TraceContext:
    """Makes a span for each HTTP request except GETs. Spans that are made meanwhile are its children.

    Its own parent is the request's `traceparent`. The answer has the span in `traceresponse`. Source: W3C
    Trace Context, and its draft of response headers.

    `tracing`: is called at each request, since the application may be built before the engine.
    """

    def __init__(self, app: ASGIApp, tracing: Callable[[], Tracing | None]) -> None:
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tracing = self._tracing()
        # No spans for GETs: probes and scrapes come every few seconds, and would only clutter the traces.
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS") or tracing is None:
            await self._app(scope, receive, send)
            return
        from opentelemetry import context, trace

        span = tracing.serve(scope)

        async def observe(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["traceresponse"] = _traceparent(span)
                span.set_attribute("http.response.status_code", message["status"])
                if message["status"] >= HTTPStatus.INTERNAL_SERVER_ERROR:
                    span.set_status(trace.StatusCode.ERROR)
            await send(message)

        token = context.attach(trace.set_span_in_context(span))
        try:
            await self._app(scope, receive, observe)
        finally:
            context.detach(token)
            span.end()


def open_tracing(args: ServerArgs) -> Tracing | None:
    """Start tracing to the collector that the arguments name; None: `--enable-trace` is not set.

    Raises ConfigurationError: OpenTelemetry is not installed.
    """
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
    """Format a span as the value of a `traceparent` header."""
    of_span = span.get_span_context()
    return f"00-{of_span.trace_id:032x}-{of_span.span_id:016x}-{of_span.trace_flags:02x}"


def _attributes(reply: io_struct.Reply | None) -> dict[str, str | bool | int | float]:
    """The fields of a reply that are numbers or strings, except its message."""
    if reply is None:
        return {}
    fields = ((name, getattr(reply, name)) for name in type(reply).__struct_fields__ if name != "message")
    return {f"ebbtide.{name}": value for name, value in fields if isinstance(value, str | bool | int | float)}
