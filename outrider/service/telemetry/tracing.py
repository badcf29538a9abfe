"""Traces of requests across the services (ADR 37), by OpenTelemetry's API: where tracing is off, its spans do nothing.

A service begins a span below its caller's (`Tracer.begin`, `Tracer.join`), passes `traceparent_of` it on with what it
asks of others, and ends it when the work has ended. Only the event loop uses spans; nothing in them is text of a prompt
or an answer. The SDK is imported by `otel_tracer.py` alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from opentelemetry.context import Context
from opentelemetry.trace import (
    INVALID_SPAN,
    NoOpTracer,
    Span,
    SpanKind,
    Status,
    StatusCode,
    TraceState,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace import Tracer as SpanMaker
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
MAX_LENGTH = 512
"""Characters of either, which W3C asks us to take; longer ones are left out."""

_W3C = TraceContextTextMapPropagator()
logging.getLogger(TraceState.__module__).disabled = True  # quotes what callers send

Metadata = Iterable[tuple[str, str | bytes]]
"""Of a gRPC call."""


def caller_of(traceparent: str, tracestate: str = "") -> Context:
    """A context with the caller's span, by W3C's headers. Callers may send anything: else it is empty."""
    if len(traceparent) > MAX_LENGTH or "\n" in traceparent:
        return Context()
    headers = {TRACEPARENT: traceparent, TRACESTATE: tracestate if len(tracestate) <= MAX_LENGTH else ""}
    return _W3C.extract(headers, Context())


def caller_of_call(metadata: Metadata | None) -> Context:
    """As a call's metadata name it; those that name two callers name none."""
    found: dict[str, list[str]] = {TRACEPARENT: [], TRACESTATE: []}
    for key, value in metadata or ():
        if key in found and isinstance(value, str):
            found[key].append(value)
    return caller_of(",".join(found[TRACEPARENT]), ",".join(found[TRACESTATE]))


def traceparent_of(span: Span) -> str:
    """W3C's header; empty where the span is not recorded."""
    headers: dict[str, str] = {}
    if span.is_recording():
        _W3C.inject(headers, set_span_in_context(span, Context()))
    return headers.get(TRACEPARENT, "")


def nanoseconds(at: float) -> int:
    """OpenTelemetry's clock, nanoseconds since 1970, at this time of the monotonic one, in seconds."""
    return time.time_ns() - round((time.monotonic() - at) * 1e9)


def fail(span: Span, reason: str) -> None:
    """The span's work failed. `reason`: one word. Nothing where the span is not recorded, or has ended."""
    if span.is_recording():
        span.set_attribute("error.type", reason)
        span.set_status(Status(StatusCode.ERROR, reason))


class Tracer:
    """Makes a service's spans; this one makes none. No method raises, or waits, because of a collector."""

    _spans: SpanMaker = NoOpTracer()

    def start(self, instance: str) -> None:
        """The service knows its name: from here on it traces."""

    def enter(self, metadata: Metadata | None) -> None:
        """What this task begins, and tasks that it starts, continues the trace of the client's call that it serves."""

    def begin(self, name: str) -> Span:
        """A request's span: below the client's, or at the root of a new trace."""
        return self._spans.start_span(name, kind=SpanKind.SERVER)

    def join(self, name: str, caller: Context) -> Span:
        """The span of what another service asks for: none where that one's is not sampled."""
        if not get_current_span(caller).get_span_context().trace_flags.sampled:
            return INVALID_SPAN
        return self._spans.start_span(name, caller, SpanKind.SERVER)

    def child(
        self, parent: Span, name: str, *, kind: SpanKind = SpanKind.INTERNAL, started_at: int | None = None
    ) -> Span:
        """A span below another one of this service, if that one is recorded. `started_at`: nanoseconds; default now."""
        if not parent.is_recording():
            return INVALID_SPAN
        return self._spans.start_span(name, set_span_in_context(parent, Context()), kind, start_time=started_at)

    def stop(self, timeout_seconds: float) -> None:
        """Sends what was recorded, or gives it up after this time. Blocks: for another thread than the event loop's."""


NO_TRACER = Tracer()
