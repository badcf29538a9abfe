"""Traces of requests across services (ADR 37), through OpenTelemetry's API, whose spans do nothing if tracing is off.

A service begins a span below its caller's (`Tracer.begin`, `Tracer.join`), sends the span's traceparent header
(`traceparent_of`) with its own requests to others, and ends the span when the work has ended. Only the event loop uses
spans; they contain no text of prompts or answers. Only `otel_tracer.py` imports the SDK.
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
"""Maximum characters of either header, the length that W3C asks receivers to accept; longer headers are ignored."""

_W3C = TraceContextTextMapPropagator()
logging.getLogger(TraceState.__module__).disabled = True  # this logger would quote callers' input

Metadata = Iterable[tuple[str, str | bytes]]
"""The metadata of a gRPC call."""


def caller_of(traceparent: str, tracestate: str = "") -> Context:
    """Returns a context with the caller's span from W3C's headers; empty if these (untrusted) headers are invalid."""
    if len(traceparent) > MAX_LENGTH or "\n" in traceparent:
        return Context()
    headers = {TRACEPARENT: traceparent, TRACESTATE: tracestate if len(tracestate) <= MAX_LENGTH else ""}
    return _W3C.extract(headers, Context())


def caller_of_call(metadata: Metadata | None) -> Context:
    """Returns the caller's context from a call's metadata; empty if the metadata names two callers."""
    found: dict[str, list[str]] = {TRACEPARENT: [], TRACESTATE: []}
    for key, value in metadata or ():
        if key in found and isinstance(value, str):
            found[key].append(value)
    return caller_of(",".join(found[TRACEPARENT]), ",".join(found[TRACESTATE]))


def traceparent_of(span: Span) -> str:
    """Returns W3C's traceparent header; empty if the span is not recorded."""
    headers: dict[str, str] = {}
    if span.is_recording():
        _W3C.inject(headers, set_span_in_context(span, Context()))
    return headers.get(TRACEPARENT, "")


def nanoseconds(at: float) -> int:
    """Converts seconds of the monotonic clock to OpenTelemetry's clock, nanoseconds since 1970."""
    return time.time_ns() - round((time.monotonic() - at) * 1e9)


def fail(span: Span, reason: str) -> None:
    """Marks the span as failed. `reason` is one word. Does nothing if the span is not recorded or has ended."""
    if span.is_recording():
        span.set_attribute("error.type", reason)
        span.set_status(Status(StatusCode.ERROR, reason))


class Tracer:
    """Makes a service's spans; this base class makes none. No method raises or waits because of a collector."""

    _spans: SpanMaker = NoOpTracer()

    def start(self, instance: str) -> None:
        """Starts tracing, once the service knows its instance name."""

    def enter(self, metadata: Metadata | None) -> None:
        """Continues the trace of the client's call in the spans of this task and of the tasks that it starts."""

    def begin(self, name: str) -> Span:
        """Begins a request's span, either below the client's span or as the root of a new trace."""
        return self._spans.start_span(name, kind=SpanKind.SERVER)

    def join(self, name: str, caller: Context) -> Span:
        """Begins the span of work for another service; returns an invalid span if the caller's span is not sampled."""
        if not get_current_span(caller).get_span_context().trace_flags.sampled:
            return INVALID_SPAN
        return self._spans.start_span(name, caller, SpanKind.SERVER)

    def child(
        self, parent: Span, name: str, *, kind: SpanKind = SpanKind.INTERNAL, started_at: int | None = None
    ) -> Span:
        """Begins a span below `parent`, a recorded span of this service. `started_at`: nanoseconds; None: now."""
        if not parent.is_recording():
            return INVALID_SPAN
        return self._spans.start_span(name, set_span_in_context(parent, Context()), kind, start_time=started_at)

    def stop(self, timeout_seconds: float) -> None:
        """Exports recorded spans until the timeout, then drops the rest. Blocks; not to be called on the event loop."""


NO_TRACER = Tracer()
