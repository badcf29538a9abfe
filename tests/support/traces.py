"""Receivers of spans in tests: a tracer that keeps them, and a collector that takes them by OTLP.

OpenTelemetry's SDK and protocol are imported when a receiver is made, since tests are also collected without them.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc
from opentelemetry.context import attach
from opentelemetry.trace import StatusCode, format_span_id, format_trace_id

from outrider.service.telemetry.tracing import Tracer, caller_of_call

TRACE_ID, CALLER_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE_ID}-{CALLER_ID}-01"
NOT_SAMPLED = f"00-{TRACE_ID}-{CALLER_ID}-00"

HOSTILE = (
    "",
    "00",
    TRACEPARENT.upper(),
    TRACEPARENT[:-1],
    TRACEPARENT + "-more",
    "ff" + TRACEPARENT[2:],
    f"00-{'0' * 32}-{CALLER_ID}-01",
    f"00-{TRACE_ID}-{'0' * 16}-01",
    "٠٠" + TRACEPARENT[2:],  # digits, but not ASCII
    TRACEPARENT + "\n",
    TRACEPARENT + " " * 600,
    "0" * 100_000,
    "01" + TRACEPARENT[2:] + "-" + "x" * 600,
)
"""Invalid values of traceparent."""


@dataclass(frozen=True)
class KeptContext:
    """The context of a span, with ids in hexadecimal."""

    trace_id: str
    span_id: str
    parent_id: str  # empty if there is none
    tracestate: str

    @property
    def traceparent(self):
        return f"00-{self.trace_id}-{self.span_id}-01"


@dataclass(frozen=True)
class KeptEvent:
    name: str
    at: int  # nanoseconds since 1970
    attributes: dict[str, object]


@dataclass(frozen=True)
class KeptSpan:
    name: str
    context: KeptContext
    kind: str
    started_at: int  # nanoseconds since 1970, as in the next field
    ended_at: int
    attributes: dict[str, object]  # without the error's
    events: list[KeptEvent]
    error: str


class KeptSpans(Tracer):
    """A tracer that keeps the spans of sampled requests and begins no trace by itself."""

    def __init__(self) -> None:
        from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
        from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased

        self.spans: list[KeptSpan] = []  # spans that have ended
        processor = SpanProcessor()
        processor.on_end = self._keep
        provider = TracerProvider(sampler=ParentBased(ALWAYS_OFF), shutdown_on_exit=False)
        provider.add_span_processor(processor)
        self._spans = provider.get_tracer("tests")

    def enter(self, metadata):
        attach(caller_of_call(metadata))

    def _keep(self, span):
        found, parent = span.get_span_context(), span.parent
        attributes = {key: list(value) if type(value) is tuple else value for key, value in span.attributes.items()}
        error = attributes.pop("error.type", "")
        assert (span.status.status_code is StatusCode.ERROR, span.status.description) == (bool(error), error or None)
        self.spans.append(
            KeptSpan(
                name=span.name,
                context=KeptContext(
                    trace_id=format_trace_id(found.trace_id),
                    span_id=format_span_id(found.span_id),
                    parent_id="" if parent is None else format_span_id(parent.span_id),
                    tracestate=found.trace_state.to_header(),
                ),
                kind=span.kind.name.lower(),
                started_at=span.start_time,
                ended_at=span.end_time,
                attributes=attributes,
                events=[KeptEvent(event.name, event.timestamp, dict(event.attributes)) for event in span.events],
                error=error,
            )
        )

    def named(self, name):
        return [span for span in self.spans if span.name == name]


@dataclass(frozen=True)
class ReceivedSpan:
    """A span as the collector received it, with ids in hexadecimal."""

    service: dict[str, str]  # attributes of the process
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    attributes: dict[str, object]
    events: list[str]
    raw: object


class Collector:
    """A collector on a loopback port. While `answers` is cleared, it receives calls and never answers them."""

    def __init__(self) -> None:
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

        self.spans: list[ReceivedSpan] = []
        self.metadata: dict[str, str] = {}  # metadata of the last call
        self.num_calls = 0
        self.answers = threading.Event()
        self.answers.set()
        self._changed = threading.Condition()
        self._answer = trace_service_pb2.ExportTraceServiceResponse()
        self._server = grpc.server(ThreadPoolExecutor(4))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self):
        self._server.start()
        return self

    def __exit__(self, *_error):
        self.answers.set()
        self._server.stop(0).wait()

    def Export(self, request, context):
        with self._changed:
            self.num_calls += 1
            self.metadata = dict(context.invocation_metadata())
            self._changed.notify_all()
        self.answers.wait()
        with self._changed:
            for resource in request.resource_spans:
                service = values_of(resource.resource.attributes)
                for scope in resource.scope_spans:
                    self.spans += [received(service, span) for span in scope.spans]
            self._changed.notify_all()
        return self._answer

    def wait_for(self, condition, *, timeout_seconds=60.0):
        """Waits until `condition(spans)` holds, and returns the spans."""
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self.spans), timeout_seconds), [
                (span.service["service.name"], span.name, span.parent_id) for span in self.spans
            ]
            return list(self.spans)

    def wait_for_call(self, *, timeout_seconds=60.0):
        with self._changed:
            assert self._changed.wait_for(lambda: self.num_calls, timeout_seconds)


def received(service, span):
    return ReceivedSpan(
        service=service,
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        attributes=values_of(span.attributes),
        events=[event.name for event in span.events],
        raw=span,
    )


def values_of(attributes):
    return {each.key: value_of(each.value) for each in attributes}


def value_of(value):
    kind = value.WhichOneof("value")
    found = getattr(value, kind)
    return [value_of(each) for each in found.values] if kind == "array_value" else found
