"""Spans by OpenTelemetry's SDK: sampled, batched and sent by a thread of its own, which drops what it cannot deliver.

The SDK reads OpenTelemetry's standard environment variables; what is not one of those is here.
"""

from __future__ import annotations

import logging
import threading
import time
from contextvars import ContextVar
from dataclasses import replace

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator, RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, Decision
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
    set_span_in_context,
)

from outrider import __version__
from outrider.service.telemetry.logging import get_logger
from outrider.service.telemetry.tracing import NO_TRACE, Metadata, Span, TraceContext, Tracer

QUIET_SECONDS = 60.0
"""Between two log lines about traces: a collector that is away fails every few seconds."""

_log = get_logger("tracing")


class OtelTracer(Tracer):
    """Spans go to `endpoint` by OTLP over gRPC."""

    def __init__(self, endpoint: str, *, role: str) -> None:
        """`endpoint`: http://host:port in plaintext, https://host:port with TLS."""
        self._endpoint = endpoint
        self._role = role
        self._given, self._random = _GivenIds(), RandomIdGenerator()
        self._caller: ContextVar[TraceContext] = ContextVar("caller", default=NO_TRACE)
        self._wall_offset = time.time() - time.monotonic()  # the one place where clocks meet
        self._exporter: OTLPSpanExporter | None = None  # until `start`

    def start(self, instance: str) -> None:
        complaints = logging.getLogger("opentelemetry")
        complaints.handlers[:] = [_Complaints()]
        complaints.propagate = False
        logging.getLogger(TraceState.__module__).disabled = True  # quotes what callers send
        self._exporter = OTLPSpanExporter(endpoint=self._endpoint)
        named = Resource.create(
            {
                "service.name": f"outrider-{self._role}",
                "service.instance.id": instance,
                "service.version": __version__,
            }
        )
        resource = named.merge(OTELResourceDetector().detect())  # what the operator says in the environment wins
        provider = self._provider = TracerProvider(resource=resource, id_generator=self._given, shutdown_on_exit=False)
        # The environment's sampler decides once for a request, when it begins; what was begun is recorded.
        self._sampler, provider.sampler = provider.sampler, ALWAYS_ON
        provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = provider.get_tracer("outrider", __version__)

    def enter(self, metadata: Metadata | None) -> None:
        self._caller.set(TraceContext.of_metadata(metadata))

    def begin(self) -> TraceContext:
        return NO_TRACE if self._exporter is None else self._below(self._caller.get())

    def join(self, parent: TraceContext) -> TraceContext:
        return NO_TRACE if self._exporter is None or not parent.is_sampled else self._below(parent)

    def _below(self, parent: TraceContext) -> TraceContext:
        """Where the sampler wants it."""
        trace_id = int(parent.trace_id, 16) if parent else self._random.generate_trace_id()
        result = self._sampler.should_sample(_context_of(parent, is_remote=True), trace_id, "", SpanKind.SERVER)
        if result.decision is not Decision.RECORD_AND_SAMPLE:
            return NO_TRACE
        span_id = self._random.generate_span_id()
        return TraceContext(f"{trace_id:032x}", f"{span_id:016x}", True, parent.tracestate, parent.span_id)

    def record(self, span: Span) -> None:
        place = span.context
        if not place.is_sampled:
            return
        self._given.ids = int(place.trace_id, 16), int(place.span_id, 16)
        parent = replace(place, span_id=place.parent_id) if place.parent_id else NO_TRACE
        recorded = self._tracer.start_span(
            span.name,
            context=_context_of(parent, is_remote=span.kind == "server"),
            kind=SpanKind[span.kind.upper()],
            attributes=span.attributes,
            start_time=self._wall_nanoseconds(span.started_at),
        )
        for event in span.events:
            recorded.add_event(event.name, event.attributes, timestamp=self._wall_nanoseconds(event.at))
        if span.error:
            recorded.set_attribute("error.type", span.error)
            recorded.set_status(Status(StatusCode.ERROR, span.error))
        recorded.end(self._wall_nanoseconds(span.ended_at))

    def stop(self, timeout_seconds: float) -> None:
        if self._exporter is None:
            return
        # By a thread that may be left behind: the SDK waits 30 s for a collector that does not answer.
        flush = threading.Thread(target=self._provider.shutdown, name="last traces", daemon=True)
        flush.start()
        flush.join(timeout_seconds)
        if flush.is_alive():
            self._exporter.shutdown()  # what is under way is given up

    def _wall_nanoseconds(self, at: float) -> int:
        """Nanoseconds since 1970 of monotonic seconds."""
        return round((at + self._wall_offset) * 1e9)


class _GivenIds(IdGenerator):
    """A span's place is known before the span: the SDK makes no ids of its own. Owned by the event loop."""

    ids: tuple[int, int] = (0, 0)  # of the span that is made next: trace and span

    def generate_trace_id(self) -> int:
        return self.ids[0]

    def generate_span_id(self) -> int:
        return self.ids[1]


def _context_of(parent: TraceContext, *, is_remote: bool) -> Context:
    if not parent:
        return Context()
    context = SpanContext(
        int(parent.trace_id, 16),
        int(parent.span_id, 16),
        is_remote=is_remote,
        trace_flags=TraceFlags(TraceFlags.SAMPLED if parent.is_sampled else TraceFlags.DEFAULT),
        trace_state=TraceState.from_header([parent.tracestate]) if parent.tracestate else None,
    )
    return set_span_in_context(NonRecordingSpan(context), Context())


class _Complaints(logging.Handler):
    """OpenTelemetry's own log, as one line in `QUIET_SECONDS`."""

    _quiet_until = 0.0

    def __init__(self) -> None:
        super().__init__(level=logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        now = time.monotonic()
        if now >= self._quiet_until:
            self._quiet_until = now + QUIET_SECONDS
            _log.warning("traces may be lost", reason=record.getMessage())
