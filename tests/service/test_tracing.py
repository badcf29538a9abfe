"""Traces: the headers of callers, the spans that a collector gets, and the cost of a dead collector."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest
from opentelemetry.context import Context, attach, detach
from opentelemetry.trace import INVALID_SPAN, format_span_id, format_trace_id, get_current_span

from outrider.errors import ConfigError
from outrider.service.config import TelemetryConfig
from outrider.service.telemetry.otel_tracer import OtelTracer
from outrider.service.telemetry.tracer_factory import make_tracer
from outrider.service.telemetry.tracing import (
    NO_TRACER,
    caller_of,
    caller_of_call,
    fail,
    nanoseconds,
    traceparent_of,
)
from tests.service.test_telemetry import log_to  # noqa: F401 a fixture
from tests.support.traces import CALLER_ID, HOSTILE, NOT_SAMPLED, TRACE_ID, TRACEPARENT, Collector

NOWHERE = "http://127.0.0.1:1"  # where nothing listens


@pytest.fixture
def collector():
    with Collector() as collector:
        yield collector


@pytest.fixture
def trace(monkeypatch):
    """Yields trace(endpoint), which returns a started tracer and stops it at the end. No environment variable
    configures traces.
    """
    for name in ("OTEL_TRACES_SAMPLER", "OTEL_RESOURCE_ATTRIBUTES", "OTEL_SERVICE_NAME"):
        monkeypatch.delenv(name, raising=False)
    tracers, context = [], attach(Context())

    def trace(endpoint, **environ):
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        tracers.append(OtelTracer(endpoint, role="router"))
        tracers[-1].start("router-7")
        return tracers[-1]

    yield trace
    for tracer in tracers:
        tracer.stop(1.0)
    detach(context)


def place_of(context):
    """Returns (trace id, span id, whether it is sampled, tracestate) of the caller in a context; None if there is no
    caller.
    """
    found = get_current_span(context).get_span_context()
    if not found.is_valid:
        return None
    ids = format_trace_id(found.trace_id), format_span_id(found.span_id)
    return *ids, bool(found.trace_flags.sampled), found.trace_state.to_header()


# ------------------------------------------------------------ what a caller says


def test_a_caller_is_read_as_w3c_has_it():
    assert place_of(caller_of(f" {TRACEPARENT}\t", "vendor=1")) == (TRACE_ID, CALLER_ID, True, "vendor=1")
    assert place_of(caller_of(NOT_SAMPLED)) == (TRACE_ID, CALLER_ID, False, "")
    later = "cc" + TRACEPARENT[2:-2] + "09-what-comes-later"
    assert place_of(caller_of(later)) == (TRACE_ID, CALLER_ID, True, "")


@pytest.mark.parametrize("traceparent", HOSTILE, ids=range(len(HOSTILE)))
def test_what_is_no_caller_is_none(traceparent):
    assert place_of(caller_of(traceparent)) is None
    assert place_of(caller_of_call([("traceparent", traceparent)])) is None


def test_metadata_may_hold_anything():
    assert place_of(caller_of_call(None)) is None
    assert place_of(caller_of_call([("traceparent", TRACEPARENT.encode())])) is None
    assert place_of(caller_of_call([("traceparent", TRACEPARENT)] * 2)) is None
    states = [("tracestate", "a=1"), ("tracestate", "b=2"), ("traceparent", TRACEPARENT)]
    assert place_of(caller_of_call(states)) == (TRACE_ID, CALLER_ID, True, "a=1,b=2")
    long = [("traceparent", TRACEPARENT), ("tracestate", "a=" + "1" * 600)]
    assert place_of(caller_of_call(long)) == (TRACE_ID, CALLER_ID, True, "")


def test_a_callers_tracestate_is_not_logged_by_a_service_without_traces(log_to):  # noqa: F811
    stream = log_to(log_format="json")
    metadata = [("traceparent", TRACEPARENT), ("tracestate", "my secret")]
    assert place_of(caller_of_call(metadata)) == (TRACE_ID, CALLER_ID, True, "")
    assert stream.getvalue() == ""


# ------------------------------------------------------------ off


def test_off_is_free():
    """No role imports OpenTelemetry's SDK, records a span, or sends one to others."""
    assert make_tracer(TelemetryConfig(), role="router") is NO_TRACER
    NO_TRACER.enter([("traceparent", TRACEPARENT)])
    for span in (NO_TRACER.begin("generate"), NO_TRACER.join("decode", caller_of(TRACEPARENT))):
        assert not span.is_recording()
        assert traceparent_of(span) == ""
        assert NO_TRACER.child(span, "queue") is INVALID_SPAN
    script = """
import sys
import router.__main__, router.router, prefill_node.servicer, decode_node.sessions, draft_node.servicer
from outrider.service.config import TelemetryConfig
from outrider.service.telemetry.tracer_factory import make_tracer
make_tracer(TelemetryConfig(), role="router").start("r")
assert not [name for name in sys.modules if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter"))]
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_an_endpoint_needs_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.delitem(sys.modules, "outrider.service.telemetry.otel_tracer")
    with pytest.raises(ConfigError, match=r"otlp_endpoint needs OpenTelemetry.*\[otel\]"):
        make_tracer(TelemetryConfig(otlp_endpoint=NOWHERE), role="router")


@pytest.mark.parametrize(
    "endpoint",
    ["localhost:4317", "http://:4317", "http://c", "grpc://c:4317", "http://c:99999", "http://c:4318/v1/traces"],
)
def test_an_endpoint_that_cannot_be_is_refused(endpoint):
    with pytest.raises(ConfigError, match="http://host:port"):
        make_tracer(TelemetryConfig(otlp_endpoint=endpoint), role="router")


def test_a_password_in_an_endpoint_is_not_repeated():
    with pytest.raises(ConfigError) as caught:
        make_tracer(TelemetryConfig(otlp_endpoint="http://me:secret@c:4317"), role="router")
    assert "secret" not in caught.value.message


# ------------------------------------------------------------ what a collector gets


def test_a_request_continues_its_callers_trace(trace, collector):
    tracer = trace(collector.endpoint, OTEL_RESOURCE_ATTRIBUTES="deployment.environment.name=test")
    tracer.enter([("traceparent", TRACEPARENT), ("tracestate", "vendor=1")])
    whole = tracer.begin("generate")
    attributes = {"gen_ai.request.model": "m", "outrider.reasons": ["stop", "length"]}
    whole.set_attributes(attributes)
    whole.add_event("first_token", {"outrider.n": 1})
    fail(whole, "QUEUE_FULL")
    now = time.monotonic()
    tracer.child(whole, "queue", started_at=nanoseconds(now - 2.5)).end(nanoseconds(now))
    tracer.join("decode", caller_of(traceparent_of(whole))).end()
    whole.end()
    fail(whole, "TOO_LATE")  # after the span's end, a failure changes nothing and logs nothing
    tracer.stop(30.0)
    queue, decode, root = collector.wait_for(lambda spans: len(spans) == 3)
    assert root.service["service.name"] == "outrider-router"
    assert root.service["service.instance.id"] == "router-7"
    assert root.service["service.version"]
    assert root.service["deployment.environment.name"] == "test"
    assert {root.trace_id, queue.trace_id, decode.trace_id} == {TRACE_ID}
    assert root.parent_id == CALLER_ID
    assert queue.parent_id == decode.parent_id == root.span_id == format_span_id(whole.get_span_context().span_id)
    assert root.attributes == {**attributes, "error.type": "QUEUE_FULL"}
    assert root.events == ["first_token"]
    assert (root.raw.kind, queue.raw.kind, decode.raw.kind) == (2, 1, 2)  # SERVER, INTERNAL, SERVER
    assert (root.raw.status.code, queue.raw.status.code) == (2, 0)  # ERROR, UNSET
    assert root.raw.trace_state == "vendor=1"
    assert queue.raw.end_time_unix_nano - queue.raw.start_time_unix_nano == pytest.approx(2.5e9, abs=1e6)
    assert abs(queue.raw.end_time_unix_nano - root.raw.end_time_unix_nano) < 1e9
    assert abs(root.raw.end_time_unix_nano / 1e9 - time.time()) < 60.0


def test_the_environment_configures_the_sdk(trace, collector):
    tracer = trace(
        collector.endpoint,
        OTEL_SERVICE_NAME="mine",
        OTEL_EXPORTER_OTLP_HEADERS="x-key=abc",
        OTEL_TRACES_SAMPLER="parentbased_always_off",
    )
    assert traceparent_of(tracer.begin("generate")) == "", "a trace that nobody asked for"
    tracer.enter([("traceparent", NOT_SAMPLED)])
    assert traceparent_of(tracer.begin("generate")) == ""
    tracer.enter([("traceparent", TRACEPARENT)])
    tracer.begin("generate").end()
    tracer.stop(30.0)
    (span,) = collector.wait_for(len)
    assert span.service["service.name"] == "mine"
    assert collector.metadata["x-key"] == "abc"


def test_a_share_of_traces_is_sampled_by_their_ids(trace, collector):
    tracer = trace(collector.endpoint, OTEL_TRACES_SAMPLER="parentbased_traceidratio", OTEL_TRACES_SAMPLER_ARG="0.5")
    sampled = [bool(traceparent_of(tracer.begin("generate"))) for _ in range(200)]
    assert {True, False} == set(sampled)


def test_without_a_caller_a_request_is_the_root_of_a_trace(trace, collector):
    tracer = trace(collector.endpoint)
    for traceparent in HOSTILE:
        tracer.enter([("traceparent", traceparent)])
        span = tracer.begin("generate")
        assert traceparent_of(span)
        span.end()
    for caller in ("", NOT_SAMPLED):
        assert tracer.join("decode", caller_of(caller)) is INVALID_SPAN
    tracer.stop(30.0)
    spans = collector.wait_for(lambda spans: len(spans) == len(HOSTILE))
    assert {span.parent_id for span in spans} == {""}
    assert len({span.trace_id for span in spans}) == len(HOSTILE)


# ------------------------------------------------------------ a collector that is dead


def record_many(tracer, num_spans=5000):
    """Records more spans than the export queue holds; returns the seconds of the slowest call."""
    slowest = 0.0
    for _ in range(num_spans):
        started = time.monotonic()
        tracer.begin("generate").end()
        slowest = max(slowest, time.monotonic() - started)
    return slowest


def test_a_collector_that_is_away_costs_nothing_and_is_one_line_of_log(trace, log_to):  # noqa: F811
    stream = log_to(log_format="json")
    tracer = trace(NOWHERE)
    assert record_many(tracer) < 5.0
    started = time.monotonic()
    tracer.stop(0.1)
    assert time.monotonic() - started < 10.0, "the SDK would wait for 30 s"
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["event"] for line in lines] == ["traces may be lost"], lines


def test_a_callers_tracestate_neither_stands_in_the_log_nor_hides_a_loss(trace, log_to):  # noqa: F811
    stream = log_to(log_format="json")
    tracer = trace(NOWHERE)
    tracer.enter([("traceparent", TRACEPARENT), ("tracestate", "my secret")])
    tracer.begin("generate").end()
    tracer.stop(0.1)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["event"] for line in lines] == ["traces may be lost"], lines
    assert "secret" not in stream.getvalue()


def test_a_collector_that_never_answers_delays_no_end(trace, collector):
    collector.answers.clear()
    tracer = trace(collector.endpoint)
    assert record_many(tracer) < 5.0
    collector.wait_for_call()
    started = time.monotonic()
    tracer.stop(0.1)
    assert time.monotonic() - started < 10.0


def test_a_tracer_that_never_started_does_nothing():
    tracer = OtelTracer(NOWHERE, role="router")
    for span in (tracer.begin("generate"), tracer.join("decode", caller_of(TRACEPARENT))):
        assert traceparent_of(span) == ""
    tracer.stop(1.0)
