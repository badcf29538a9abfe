"""A request's trace: the router's spans, and the parents that it gives to nodes' spans."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from opentelemetry.trace import INVALID_SPAN
from prometheus_client import CollectorRegistry

from outrider.service.telemetry.metrics import RouterMetrics
from outrider.v1 import router_pb2
from router.observe.records import Records
from router.observe.spans import MAX_REQUEST_SPANS, MAX_TRACED, SpanKind
from tests.router.conftest import PATIENCE_SECONDS, eventually, make_request, read_rest, refused, told
from tests.support.router_fakes import letters
from tests.support.traces import CALLER_ID, HOSTILE, NOT_SAMPLED, TRACE_ID, TRACEPARENT, KeptSpans

METADATA = (("traceparent", TRACEPARENT), ("tracestate", "vendor=1"))


@pytest.fixture
def tracer():
    return KeptSpans()


async def generate(cluster, metadata=METADATA, **fields):
    call = cluster.stub.Generate(make_request(**fields), metadata=metadata, timeout=PATIENCE_SECONDS)
    return await read_rest(call)


def named(tracer, name):
    (span,) = tracer.named(name)
    return span


async def test_a_request_is_one_tree_from_its_caller_to_the_nodes(cluster, tracer):
    await cluster.serve(tracer=tracer)
    await generate(cluster, text="a secret prompt", n=2, seed=3)
    await eventually(lambda: tracer.named("generate"))
    whole, attempt, prefill = (named(tracer, name) for name in ("generate", "attempt", "prefill"))
    assert {span.context.trace_id for span in tracer.spans} == {TRACE_ID}
    assert (whole.context.parent_id, whole.kind, whole.context.tracestate) == (CALLER_ID, "server", "vendor=1")
    for name in ("encode", "queue", "attempt"):
        assert named(tracer, name).context.parent_id == whole.context.span_id
    assert prefill.context.parent_id == attempt.context.span_id
    assert prefill.kind == "client"
    assert [opened.traceparent for opened in cluster.decode.opened] == [attempt.context.traceparent]
    assert cluster.prefill.traceparents == [prefill.context.traceparent]
    assert whole.started_at <= attempt.started_at <= prefill.started_at <= prefill.ended_at <= attempt.ended_at
    assert not any(span.error for span in tracer.spans)
    attributes = whole.attributes
    assert attributes["gen_ai.request.model"]
    assert attributes["gen_ai.request.choice.count"] == 2
    assert attributes["gen_ai.usage.input_tokens"] == len(cluster.decode.opened[0].prompt_token_ids)
    assert attributes["gen_ai.usage.output_tokens"] == 16
    assert attributes["gen_ai.response.finish_reasons"] == ["length", "length"]
    times = [attributes[f"gen_ai.latency.{name}"] for name in ("time_in_queue", "time_to_first_token", "e2e")]
    assert times == sorted(times)
    assert attempt.attributes == {"outrider.attempt": 0, "outrider.decode_node": "decode-0"}
    assert prefill.attributes == {"outrider.prefill_node": "prefill-0"}
    assert "secret" not in repr(tracer.spans)


async def test_a_request_that_moves_shows_both_decode_nodes(node_pair, tracer):
    await node_pair.serve(tracer=tracer)
    call = node_pair.stub.Generate(make_request(max_tokens=200), metadata=METADATA, timeout=PATIENCE_SECONDS)
    await node_pair.until_streaming()
    busy, free = node_pair.busy_and_free()
    await busy.break_sessions()
    node_pair.pace(0.0)
    await read_rest(call)
    await eventually(lambda: tracer.named("generate"))
    first, second = tracer.named("attempt")
    assert first.attributes["outrider.decode_node"] == busy.name
    assert first.attributes["outrider.moved_because"] == first.error == "decode_lost"
    assert second.attributes == {"outrider.attempt": 1, "outrider.decode_node": free.name}
    assert second.error == ""
    assert [opened.traceparent for opened in free.opened] == [second.context.traceparent]
    whole = named(tracer, "generate")
    assert [(event.name, event.attributes["outrider.cause"]) for event in whole.events] == [("moved", "decode_lost")]
    assert whole.error == ""
    assert [span.context.parent_id for span in tracer.named("prefill")] == [
        first.context.span_id,
        second.context.span_id,
    ]


async def test_what_is_not_sampled_is_no_span_and_no_byte(cluster, tracer):
    """Hostile headers count as not sampled, because the router does not start traces by itself here."""
    await cluster.serve(tracer=tracer)
    for traceparent in (NOT_SAMPLED, *HOSTILE[1:5], "x" * 2000):
        messages = await generate(cluster, (("traceparent", traceparent),))
        assert messages[-1].HasField("summary")
    await cluster.is_empty()
    assert {opened.traceparent for opened in cluster.decode.opened} == {""}
    assert cluster.prefill.traceparents == []
    assert tracer.spans == []


async def test_a_request_that_fails_says_why_in_one_word(cluster, tracer):
    await cluster.serve(tracer=tracer, no_node_timeout_seconds=0.05)
    await cluster.decode.stop()
    await eventually(lambda: not cluster.service.nodes.decode_nodes)
    call = cluster.stub.Generate(make_request("a secret prompt"), metadata=METADATA, timeout=PATIENCE_SECONDS)
    assert (await refused(call)).reason == "NO_NODE"
    await eventually(lambda: tracer.named("generate"))
    whole = named(tracer, "generate")
    assert whole.error == "NO_NODE"
    assert whole.attributes["outrider.state"] == "failed"
    assert not tracer.named("attempt")
    assert "secret" not in repr(tracer.spans)


async def test_a_client_that_leaves_is_no_error(cluster, tracer):
    await cluster.serve(tracer=tracer)
    cluster.decode.step_seconds = 0.01
    call = cluster.stub.Generate(make_request(max_tokens=500), metadata=METADATA)
    await call.read()
    call.cancel()
    await eventually(lambda: tracer.named("generate"))
    whole = named(tracer, "generate")
    assert (whole.error, whole.attributes["outrider.state"]) == ("", "aborted")


async def test_a_request_that_is_taken_over_continues_the_trace_of_the_call_that_resumes_it(router_pair, tracer):
    await router_pair.serve(tracer=tracer)
    _, started, _ = await router_pair.begin(max_tokens=30)  # this call is not traced
    await router_pair.kill_first()
    request = router_pb2.ResumeRequest(request_id="r", next_positions={0: started.num_prompt_tokens})
    call = router_pair.second.stub.Resume(request, metadata=METADATA, timeout=PATIENCE_SECONDS)
    assert told(await read_rest(call)) == letters(router_pair.first.decode.opened[0], 0)
    await eventually(lambda: tracer.named("generate"))
    whole = named(tracer, "generate")
    assert (whole.context.trace_id, whole.context.parent_id) == (TRACE_ID, CALLER_ID)
    assert named(tracer, "attempt").context.parent_id == whole.context.span_id


async def test_a_request_has_a_bounded_number_of_spans(tracer):
    tracer.enter(METADATA)
    records = Records(1, tracer=tracer)
    record = records.begin("r", RouterMetrics(model_name="m", registry=CollectorRegistry()))
    for _ in range(MAX_REQUEST_SPANS):
        record.begin_span(SpanKind.QUEUE).close()
        record.begin_attempt(SimpleNamespace(name="decode-0"), num_known_tokens=3)
    records.end(record, None)
    assert [len(tracer.named(name)) for name in ("queue", "attempt", "generate")] == [MAX_TRACED // 2] * 2 + [1]
    assert {span.traced for span in record.spans} == {record.traced} == {INVALID_SPAN}, "none is kept for the page"
    assert record.attempts == []
