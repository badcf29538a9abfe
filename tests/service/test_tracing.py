"""Traces: what callers may say, what is sent to a collector, and what a collector that is dead costs."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from outrider.errors import ConfigError
from outrider.service.config import TelemetryConfig
from outrider.service.telemetry.otel_tracer import OtelTracer
from outrider.service.telemetry.tracer_factory import make_tracer
from outrider.service.telemetry.tracing import NO_TRACE, NO_TRACER, Span, SpanEvent, TraceContext
from tests.service.test_telemetry import log_to  # noqa: F401 a fixture
from tests.support.traces import CALLER_ID, HOSTILE, NOT_SAMPLED, TRACE_ID, TRACEPARENT, Collector

NOWHERE = "http://127.0.0.1:1"  # where nothing listens


@pytest.fixture
def collector():
    with Collector() as collector:
        yield collector


@pytest.fixture
def trace(monkeypatch):
    """trace(endpoint) → a tracer that has started; stopped at the end. The environment says nothing about traces."""
    for name in ("OTEL_TRACES_SAMPLER", "OTEL_RESOURCE_ATTRIBUTES", "OTEL_SERVICE_NAME"):
        monkeypatch.delenv(name, raising=False)
    tracers = []

    def trace(endpoint, **environ):
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        tracers.append(OtelTracer(endpoint, role="router"))
        tracers[-1].start("router-7")
        return tracers[-1]

    yield trace
    for tracer in tracers:
        tracer.stop(1.0)


def span_at(place, **fields):
    return Span(**{"name": "generate", "context": place, "started_at": 1.0, "ended_at": 3.5} | fields)


# ------------------------------------------------------------ what a caller says


def test_a_place_is_read_and_written_as_w3c_has_it():
    place = TraceContext.parse(f" {TRACEPARENT}\t", "vendor=1")
    assert (place.trace_id, place.span_id, place.is_sampled) == (TRACE_ID, CALLER_ID, True)
    assert (place.traceparent, place.tracestate) == (TRACEPARENT, "vendor=1")
    assert not TraceContext.parse(NOT_SAMPLED).is_sampled
    assert TraceContext.parse("cc" + TRACEPARENT[2:-2] + "09-what-comes-later").traceparent == TRACEPARENT
    assert NO_TRACE.traceparent == NO_TRACE.child("x").traceparent == ""


@pytest.mark.parametrize("traceparent", HOSTILE, ids=range(len(HOSTILE)))
def test_what_is_no_place_is_none(traceparent):
    assert TraceContext.parse(traceparent) is NO_TRACE
    assert not TraceContext.of_metadata([("traceparent", traceparent)])


def test_metadata_may_hold_anything():
    assert TraceContext.of_metadata(None) is NO_TRACE
    assert TraceContext.of_metadata([("traceparent", TRACEPARENT.encode())]) is NO_TRACE
    assert TraceContext.of_metadata([("traceparent", TRACEPARENT)] * 2) is NO_TRACE
    states = [("tracestate", "a=1"), ("tracestate", "b=2"), ("traceparent", TRACEPARENT)]
    assert TraceContext.of_metadata(states).tracestate == "a=1,b=2"
    long = TraceContext.of_metadata([("traceparent", TRACEPARENT), ("tracestate", "a=" + "1" * 600)])
    assert (long.traceparent, long.tracestate) == (TRACEPARENT, "")


def test_a_key_always_names_the_same_place_below():
    place = TraceContext.parse(TRACEPARENT)
    child = place.child("attempt 0")
    assert child == place.child("attempt 0") != place.child("attempt 1")
    assert (child.trace_id, child.parent_id, child.is_sampled) == (TRACE_ID, CALLER_ID, True)
    assert TraceContext.parse(child.traceparent).span_id == child.span_id


# ------------------------------------------------------------ off


def test_off_is_free():
    """Nothing of OpenTelemetry is imported, in no role."""
    assert make_tracer(TelemetryConfig(), role="router") is NO_TRACER
    script = """
import sys
import router.__main__, router.router, prefill_node.servicer, decode_node.sessions, draft_node.servicer
from outrider.service.config import TelemetryConfig
from outrider.service.telemetry.tracer_factory import make_tracer
make_tracer(TelemetryConfig(), role="router").start("r")
assert not [name for name in sys.modules if name.startswith("opentelemetry")]
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_an_endpoint_needs_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.context", None)
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
    place = tracer.begin()
    now = time.monotonic()
    events = [SpanEvent("first_token", now, {"outrider.n": 1})]
    attributes = {"gen_ai.request.model": "m", "outrider.reasons": ["stop", "length"]}
    whole = {"started_at": now - 2.5, "ended_at": now, "kind": "server"}
    tracer.record(span_at(place, attributes=attributes, events=events, error="QUEUE_FULL", **whole))
    tracer.record(span_at(place.child("queue"), name="queue"))
    remote = tracer.join(TraceContext.parse(place.traceparent))
    tracer.record(span_at(remote, name="decode", kind="server"))
    tracer.stop(30.0)
    root, queue, decode = collector.wait_for(lambda spans: len(spans) == 3)
    assert root.service["service.name"] == "outrider-router"
    assert root.service["service.instance.id"] == "router-7"
    assert root.service["service.version"]
    assert root.service["deployment.environment.name"] == "test"
    assert {root.trace_id, queue.trace_id, decode.trace_id} == {TRACE_ID}
    assert root.parent_id == CALLER_ID
    assert queue.parent_id == decode.parent_id == root.span_id == place.span_id
    assert root.attributes == {**attributes, "error.type": "QUEUE_FULL"}
    assert root.events == ["first_token"]
    assert (root.raw.kind, queue.raw.kind) == (2, 1)  # SERVER, INTERNAL
    assert (root.raw.status.code, queue.raw.status.code) == (2, 0)  # ERROR, UNSET
    assert root.raw.trace_state == "vendor=1"
    assert root.raw.end_time_unix_nano - root.raw.start_time_unix_nano == pytest.approx(2.5e9, abs=1e6)
    assert abs(root.raw.end_time_unix_nano / 1e9 - time.time()) < 60.0


def test_the_environment_configures_the_sdk(trace, collector):
    tracer = trace(
        collector.endpoint,
        OTEL_SERVICE_NAME="mine",
        OTEL_EXPORTER_OTLP_HEADERS="x-key=abc",
        OTEL_TRACES_SAMPLER="parentbased_always_off",
    )
    assert tracer.begin() is NO_TRACE, "a trace that nobody asked for"
    tracer.enter([("traceparent", NOT_SAMPLED)])
    assert tracer.begin() is NO_TRACE
    tracer.enter([("traceparent", TRACEPARENT)])
    tracer.record(span_at(tracer.begin()))
    tracer.stop(30.0)
    (span,) = collector.wait_for(len)
    assert span.service["service.name"] == "mine"
    assert collector.metadata["x-key"] == "abc"


def test_a_share_of_traces_is_sampled_by_their_ids(trace, collector):
    tracer = trace(collector.endpoint, OTEL_TRACES_SAMPLER="parentbased_traceidratio", OTEL_TRACES_SAMPLER_ARG="0.5")
    sampled = [bool(tracer.begin()) for _ in range(200)]
    assert {True, False} == set(sampled)


def test_without_a_caller_a_request_is_the_root_of_a_trace(trace, collector):
    tracer = trace(collector.endpoint)
    for traceparent in HOSTILE:
        tracer.enter([("traceparent", traceparent)])
        place = tracer.begin()
        assert place.is_sampled
        assert place.parent_id == ""
        tracer.record(span_at(place))
    assert tracer.join(NO_TRACE) is NO_TRACE
    assert tracer.join(TraceContext.parse(NOT_SAMPLED)) is NO_TRACE
    tracer.stop(30.0)
    spans = collector.wait_for(lambda spans: len(spans) == len(HOSTILE))
    assert {span.parent_id for span in spans} == {""}
    assert len({span.trace_id for span in spans}) == len(HOSTILE)


# ------------------------------------------------------------ a collector that is dead


def record_many(tracer, num_spans=5000):
    """More than are kept for sending; returns the seconds that the slowest took."""
    slowest = 0.0
    for _ in range(num_spans):
        started = time.monotonic()
        tracer.record(span_at(tracer.begin()))
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
    tracer.record(span_at(tracer.begin()))
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
    assert tracer.begin() is NO_TRACE
    assert tracer.join(TraceContext.parse(TRACEPARENT)) is NO_TRACE
    tracer.stop(1.0)
