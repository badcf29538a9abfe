"""The trace of a request through four real processes, as a collector receives it."""

from __future__ import annotations

from collections import Counter

import grpc

from outrider.v1 import router_pb2, router_pb2_grpc
from tests.support.traces import CALLER_ID, HOSTILE, NOT_SAMPLED, TRACE_ID, TRACEPARENT

WAIT_SECONDS = 60.0
NUM_TOKENS = 40


def generate(running, traceparent, *, first_id=20, **fields):
    """Sends a long prompt, whose ids `first_id` determines, and returns the last message of the answer."""
    sampling = router_pb2.SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, **fields)
    prompt = router_pb2.TokenIds(ids=[(place * 7) % 250 + first_id for place in range(120)])
    stop = router_pb2.StopConditions(ignore_eos=True)
    request = router_pb2.GenerateRequest(token_ids=prompt, sampling=sampling, stop=stop)
    with grpc.insecure_channel(running.router_address) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        metadata = (("traceparent", traceparent), ("tracestate", "vendor=1"))
        *_, last = stub.Generate(request, metadata=metadata, timeout=WAIT_SECONDS)
        return last


def has_all(spans):
    """Returns whether each span's parent has arrived."""
    return {span.parent_id for span in spans} <= {span.span_id for span in spans} | {CALLER_ID}


def test_a_request_is_one_tree_over_all_four_services(running):
    for traceparent in (NOT_SAMPLED, HOSTILE[2], HOSTILE[-1]):  # such requests are not traced
        assert generate(running, traceparent).summary.usage.num_generated_tokens == NUM_TOKENS
    assert generate(running, TRACEPARENT, first_id=21, n=2).summary.usage.num_generated_tokens == 2 * NUM_TOKENS
    names = {"attempt", "decode", "draft", "encode", "generate", "kv_push", "prefill", "queue"}
    spans = running.collector.wait_for(lambda spans: {span.name for span in spans} == names and has_all(spans))
    assert {span.trace_id for span in spans} == {TRACE_ID}
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans)
    roles = {"outrider-router", "outrider-prefill_node", "outrider-decode_node", "outrider-draft_node"}
    assert {span.service["service.name"] for span in spans} == roles

    def way(span):
        """Returns the span's name and those of its ancestors, each with its service."""
        named = f"{span.service['service.name'].removeprefix('outrider-')}:{span.name}"
        if span.parent_id == CALLER_ID:
            return [named]
        return [*way(by_id[span.parent_id]), named]

    attempt = "router:generate/router:attempt"
    ways = Counter("/".join(way(span)) for span in spans)
    assert ways.pop(f"{attempt}/decode_node:decode/draft_node:draft") in {1, 2}, "of each sample that lasted"
    assert sorted(ways.elements()) == [
        "router:generate",
        attempt,
        f"{attempt}/decode_node:decode",
        f"{attempt}/router:prefill",
        f"{attempt}/router:prefill/prefill_node:prefill",
        f"{attempt}/router:prefill/prefill_node:prefill/prefill_node:kv_push",
        "router:generate/router:encode",
        "router:generate/router:queue",
    ]
    one = {span.name: span for span in spans}
    assert one["generate"].attributes["gen_ai.usage.output_tokens"] == 2 * NUM_TOKENS
    assert one["decode"].attributes["gen_ai.usage.output_tokens"] == 2 * NUM_TOKENS
    assert one["decode"].events == ["granted", "kv_ready", "first_token"]
    assert one["attempt"].attributes["outrider.decode_node"] == one["decode"].service["service.instance.id"]
    assert one["kv_push"].attributes["outrider.kv_bytes"] > 0
    for span in spans:
        parent = by_id.get(span.parent_id, span)
        assert span.raw.start_time_unix_nano >= parent.raw.start_time_unix_nano - 50_000_000, (
            "one clock, on one machine"
        )
