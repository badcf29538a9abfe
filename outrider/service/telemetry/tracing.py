"""Traces of requests across the services (ADR 37). Where tracing is off, a call here does nothing.

A service says where in a trace its work stands (`Tracer.begin`, `Tracer.join`), passes that place on with what it asks
of others, and records a `Span` when the work has ended. A place is a value, which any thread may carry; only the event
loop records. OpenTelemetry is imported by `otel_tracer.py` alone.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
MAX_LENGTH = 512
"""Characters of either, which W3C asks us to take; longer ones are left out."""

_TRACEPARENT = re.compile(r"[ \t]*([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-[!-~]*)?[ \t]*")

Metadata = Iterable[tuple[str, str | bytes]]
"""Of a gRPC call."""
Attributes = Mapping[str, str | bool | int | float | Sequence[str]]


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A span's place in a trace. False where there is none."""

    trace_id: str = ""  # 32 lower-case hexadecimal digits, not all zero
    span_id: str = ""  # 16
    is_sampled: bool = False  # whether what happens there is recorded
    tracestate: str = ""  # other tracing systems' own; not passed on to nodes
    parent_id: str = ""  # of the span above it, where this process knows it

    def __bool__(self) -> bool:
        return bool(self.trace_id)

    @classmethod
    def parse(cls, traceparent: str, tracestate: str = "") -> TraceContext:
        """Of W3C's headers. Callers may send anything: what is not well-formed is no place."""
        found = _TRACEPARENT.fullmatch(traceparent) if len(traceparent) <= MAX_LENGTH else None
        if found is None:
            return NO_TRACE
        version, trace_id, span_id, flags, rest = found.groups()
        if version == "ff" or (version == "00" and rest) or not int(trace_id, 16) or not int(span_id, 16):
            return NO_TRACE
        is_sampled = bool(int(flags, 16) & 1)
        return cls(trace_id, span_id, is_sampled, tracestate if len(tracestate) <= MAX_LENGTH else "")

    @classmethod
    def of_metadata(cls, metadata: Metadata | None) -> TraceContext:
        """What a call says; one that names two places has none."""
        found: dict[str, list[str]] = {TRACEPARENT: [], TRACESTATE: []}
        for key, value in metadata or ():
            if key in found and isinstance(value, str):
                found[key].append(value)
        return cls.parse(",".join(found[TRACEPARENT]), ",".join(found[TRACESTATE]))

    @property
    def traceparent(self) -> str:
        """W3C's header; empty for no place."""
        return f"00-{self.trace_id}-{self.span_id}-{int(self.is_sampled):02x}" if self.trace_id else ""

    def child(self, key: str) -> TraceContext:
        """The place below this one that the key always names: it can be passed on before its span is recorded."""
        if not self.trace_id:
            return self
        span_id = hashlib.blake2b(f"{self.span_id} {key}".encode(), digest_size=8).hexdigest()
        return TraceContext(self.trace_id, span_id, self.is_sampled, self.tracestate, self.span_id)


NO_TRACE = TraceContext()


class SpanEvent(NamedTuple):
    name: str
    at: float  # monotonic seconds
    attributes: Attributes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """What took time, and has ended. Monotonic seconds. Nothing in it is text of a prompt or an answer."""

    name: str
    context: TraceContext
    started_at: float
    ended_at: float
    kind: Literal["internal", "server", "client"] = "internal"  # server: the span above it is another process's
    attributes: Attributes = field(default_factory=dict)
    events: Sequence[SpanEvent] = ()
    error: str = ""  # one word for why it failed; empty: it did not


class Tracer:
    """Traces nothing. Owned by the event loop. No method raises, or waits, because of a collector."""

    def start(self, instance: str) -> None:
        """The service knows its name: from here on it traces."""

    def enter(self, metadata: Metadata | None) -> None:
        """What this task begins, and tasks that it starts, continues the trace of the client's call that it serves."""

    def begin(self) -> TraceContext:
        """The place of a request: below the client's, or at the root of a new trace. `NO_TRACE`: it is not sampled."""
        return NO_TRACE

    def join(self, parent: TraceContext) -> TraceContext:
        """The place of what another service asks for. `NO_TRACE`: it is not sampled."""
        return NO_TRACE

    def record(self, span: Span) -> None:
        """One at a place that `begin` or `join` gave, or below it."""

    def stop(self, timeout_seconds: float) -> None:
        """Sends what was recorded, or gives it up after this time. Blocks: for another thread than the event loop's."""


NO_TRACER = Tracer()
