"""Traces a request through every process that it crosses. The only file that imports OpenTelemetry.

    client ─traceparent─▶ router ─traceparent─▶ decode worker ─traceparent─▶ prefill worker        gRPC metadata
    span                  request, attempts     decode, kv.transfer          prefill

The phases of the receipt are spans of the process that measured them, with the attribute `tandem.phase`; they are
created when the phase is over, with the times of the receipt. No span contains text of a prompt or an answer.

Spans are passed explicitly, as arguments: the generators of one request run in several tasks, and in some of them the
"current span" would be another request's. Where tracing is off, every span is NO_SPAN, which records nothing and sends
no metadata. OpenTelemetry is imported only when tracing is turned on.
"""

from __future__ import annotations

import asyncio
import functools
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from time import monotonic, time_ns
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from structlog.contextvars import bind_contextvars

from tandem.errors import Cancelled, TandemError
from tandem.results import FINISH_REASONS, PATHS
from tandem.settings import Settings
from tandem.v1 import generation_pb2

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Tracer

Headers = Callable[[], Iterable[tuple[str, Any]] | None]  # called only where tracing is on
Attributes = Mapping[str, Any]
EXPORT_TIMEOUT_S = 5.0
LAST_EXPORT_TIMEOUT_S = 3.0  # for spans that were not exported when a process ends
MAX_ATTRIBUTE_CHARACTERS = 512
PHASE_ATTRIBUTE = "tandem.phase"
PROPAGATED_HEADERS = ("traceparent", "tracestate")


class Span:
    """A timed operation. This base class is a no-op: neither recorded nor propagated. A `with` block ends the span."""

    headers: tuple[tuple[str, str], ...] = ()
    """Metadata that carries the trace to the process called next."""
    trace_id = ""

    def __bool__(self) -> bool:
        """Whether the span is recorded; callers skip work that only a recorded span needs."""
        return False

    def begin(self, name: str, attributes: Attributes | None = None) -> Span:
        """A child span that begins now."""
        return self

    def part(
        self,
        name: str,
        start: float,
        seconds: float,
        attributes: Attributes | None = None,
        error: BaseException | None = None,
    ) -> None:
        """A child span that is over; it began at `start` (time.monotonic)."""

    def phase(self, name: str, start: float, seconds: float) -> None:
        """As `part`, for a phase of the receipt."""

    def set(self, attributes: Attributes) -> None:
        """Adds attributes."""

    def answered(self, finished: generation_pb2.Finished) -> None:
        """Adds how a request ended, by OpenTelemetry's conventions for generative AI."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the span, with `error` if there is one."""


NO_SPAN = Span()


class Tracing:
    """Creates the spans of one process. This base class creates none."""

    def serve(self, name: str, headers: Headers, attributes: Attributes | None = None) -> Span:
        """The span of an incoming call. Continues the caller's trace if `headers` name one. Call it in a task that
        serves only this request: its log lines carry the trace id from here on."""
        return NO_SPAN

    def request(self, request: generation_pb2.GenerateRequest, model: str, headers: Headers) -> Span:
        """As `serve`, for a client's request, by OpenTelemetry's conventions for generative AI."""
        return NO_SPAN

    def call(self, name: str, attributes: Attributes) -> Span:
        """The span of an outgoing call."""
        return NO_SPAN

    def close(self) -> None:
        """Exports the remaining spans, within some seconds."""


NO_TRACING = Tracing()


def of_process(settings: Settings, role: str, worker_id: str) -> Tracing:
    """Configured by the settings `otlp_endpoint` and `trace_ratio`."""
    if settings.otlp_endpoint is None:
        return NO_TRACING
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    exporter = OTLPSpanExporter(
        endpoint=settings.otlp_endpoint,
        insecure=settings.otlp_endpoint.startswith("http://"),
        timeout=EXPORT_TIMEOUT_S,
    )
    return exporting(exporter, settings.trace_ratio, f"tandem-{role}", worker_id)


def exporting(exporter: SpanExporter, ratio: float, service: str, instance: str) -> Tracing:
    """Exports the spans of traces that were sampled where they began, and of a share `ratio` of those that begin
    here."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import SpanLimits, TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

    provider = TracerProvider(
        sampler=ParentBasedTraceIdRatio(ratio),
        resource=Resource.create({"service.name": service, "service.instance.id": instance}),
        shutdown_on_exit=False,
        span_limits=SpanLimits(max_attribute_length=MAX_ATTRIBUTE_CHARACTERS),  # they may be a client's
    )
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return _Tracing(provider.get_tracer("tandem"), provider, exporter)


def of_application() -> Tracing:
    """For a client: uses the application's tracer provider, if there is one."""
    if "opentelemetry.trace" not in sys.modules:
        return NO_TRACING
    from opentelemetry import trace

    provider = trace.get_tracer_provider()
    return NO_TRACING if isinstance(provider, trace.ProxyTracerProvider) else _of(provider)


@functools.lru_cache(maxsize=1)
def _of(provider: Any) -> Tracing:
    return _Tracing(provider.get_tracer("tandem"))


class _Tracing(Tracing):
    def __init__(
        self, tracer: Tracer, provider: TracerProvider | None = None, exporter: SpanExporter | None = None
    ) -> None:
        from opentelemetry import context, trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self.otel = trace
        self.tracer = tracer
        self.propagator = TraceContextTextMapPropagator()
        self._nowhere = context.Context()  # otherwise a caller in the same process would become the parent
        self._provider, self._exporter = provider, exporter

    def serve(self, name: str, headers: Headers, attributes: Attributes | None = None) -> Span:
        carried = {key: value for key, value in headers() or () if key in PROPAGATED_HEADERS and isinstance(value, str)}
        parent = self.propagator.extract(carried, self._nowhere)
        kind = self.otel.SpanKind.SERVER
        span = _Span(self, self.tracer.start_span(name, parent, kind, dict(attributes or {})))
        bind_contextvars(trace_id=span.trace_id)
        return span

    def request(self, request: generation_pb2.GenerateRequest, model: str, headers: Headers) -> Span:
        operation = "chat" if request.WhichOneof("input") == "chat" else "text_completion"
        span = self.serve(f"{operation} {model}", headers)
        if span:
            span.set(_request_attributes(request, model, operation))
        return span

    def call(self, name: str, attributes: Attributes) -> Span:
        return _Span(self, self.tracer.start_span(name, None, self.otel.SpanKind.CLIENT, dict(attributes)))

    def close(self) -> None:
        if self._provider is None or self._exporter is None:
            return
        ending = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        ending.start()
        ending.join(LAST_EXPORT_TIMEOUT_S)
        if ending.is_alive():
            self._exporter.shutdown()  # the collector is gone; ends the exporter's retries


class _Span(Span):
    def __init__(self, tracing: _Tracing, span: Any) -> None:
        self._tracing = tracing
        self._span = span
        self._inside = tracing.otel.set_span_in_context(span, tracing._nowhere)
        carrier: dict[str, str] = {}
        tracing.propagator.inject(carrier, self._inside)
        self.headers = tuple(carrier.items())
        self.trace_id = self._tracing.otel.format_trace_id(span.get_span_context().trace_id)

    def __bool__(self) -> bool:
        return bool(self._span.is_recording())

    def begin(self, name: str, attributes: Attributes | None = None) -> Span:
        return _Span(self._tracing, self._tracing.tracer.start_span(name, self._inside, attributes=attributes))

    def part(
        self,
        name: str,
        start: float,
        seconds: float,
        attributes: Attributes | None = None,
        error: BaseException | None = None,
    ) -> None:
        if not self:
            return
        began = time_ns() - int((monotonic() - start) * 1e9)
        part = self._tracing.tracer.start_span(name, self._inside, attributes=attributes, start_time=began)
        self._failed(part, error)
        part.end(began + max(0, int(seconds * 1e9)))

    def phase(self, name: str, start: float, seconds: float) -> None:
        self.part(name, start, seconds, {PHASE_ATTRIBUTE: name})

    def set(self, attributes: Attributes) -> None:
        self._span.set_attributes(attributes)

    def answered(self, finished: generation_pb2.Finished) -> None:
        if self:
            self.set(_answer_attributes(finished))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._failed(self._span, error)
        self._span.end()

    def _failed(self, span: Any, error: BaseException | None) -> None:
        if error is None:
            return
        if isinstance(error, asyncio.CancelledError | GeneratorExit | Cancelled):
            span.set_attribute("tandem.cancelled", True)
            return
        # Without the message, which may quote the request.
        span.set_attribute("error.type", error.reason if isinstance(error, TandemError) else type(error).__name__)
        span.set_status(self._tracing.otel.StatusCode.ERROR)


def _request_attributes(request: generation_pb2.GenerateRequest, model: str, operation: str) -> Attributes:
    from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as names

    attributes: dict[str, Any] = {
        names.GEN_AI_OPERATION_NAME: operation,
        names.GEN_AI_PROVIDER_NAME: "tandem",
        names.GEN_AI_REQUEST_MODEL: request.adapter or model,
    }
    optional = {
        "max_tokens": names.GEN_AI_REQUEST_MAX_TOKENS,
        "temperature": names.GEN_AI_REQUEST_TEMPERATURE,
        "top_p": names.GEN_AI_REQUEST_TOP_P,
        "top_k": names.GEN_AI_REQUEST_TOP_K,
        "frequency_penalty": names.GEN_AI_REQUEST_FREQUENCY_PENALTY,
        "presence_penalty": names.GEN_AI_REQUEST_PRESENCE_PENALTY,
        "n": names.GEN_AI_REQUEST_CHOICE_COUNT,
    }
    sampling = request.sampling
    return attributes | {name: getattr(sampling, field) for field, name in optional.items() if sampling.HasField(field)}


def _answer_attributes(finished: generation_pb2.Finished) -> Attributes:
    from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as names

    receipt = finished.receipt
    attributes: dict[str, Any] = {
        names.GEN_AI_RESPONSE_ID: receipt.request_id,
        names.GEN_AI_RESPONSE_MODEL: receipt.adapter or receipt.model,
        names.GEN_AI_RESPONSE_FINISH_REASONS: [FINISH_REASONS.get(finished.reason, "unknown")],
        names.GEN_AI_USAGE_INPUT_TOKENS: receipt.prompt_tokens,
        names.GEN_AI_USAGE_OUTPUT_TOKENS: receipt.completion_tokens,
        names.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: receipt.cached_tokens,
        names.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK: receipt.ttft_seconds,
        "tandem.path": PATHS.get(receipt.path, "unknown"),
        "tandem.decode_worker": receipt.decode_worker,
        "tandem.attempts": receipt.attempts,
        "tandem.preemptions": receipt.preemptions,
    }
    return attributes | ({"tandem.prefill_worker": receipt.prefill_worker} if receipt.prefill_worker else {})
