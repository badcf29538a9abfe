"""A sequence group's span, from the opening of the group to each kind of end."""

from __future__ import annotations

import pytest

from decode_node.group_traces import MAX_EVENTS, GroupTraces
from outrider.request import FinishReason, RequestOptions, SamplingParams
from outrider.session import (
    CancelSequenceGroup,
    Granted,
    KvFailed,
    KvReady,
    OpenSequenceGroup,
    Rejected,
    RejectReason,
    SampleDone,
    SampleStart,
    SampleTokens,
    SequenceGroupFailed,
    SpeculationCounts,
)
from tests.support.traces import CALLER_ID, HOSTILE, NOT_SAMPLED, TRACE_ID, TRACEPARENT, KeptSpans

GROUP, SESSION = bytes(16), 7
GRANTED = Granted(
    sequence_group_id=GROUP, transfer_id=b"", kv_address="", held_prefix_length=16, num_tokens_to_compute=1
)
READY = KvReady(sequence_group_id=GROUP, transfer_id=b"", connector="grpc", kv_bytes=99, transfer_seconds=0.1)


@pytest.fixture
def tracer():
    return KeptSpans()


@pytest.fixture
def traces(tracer):
    return GroupTraces(tracer)


def opened(traceparent=TRACEPARENT, *, num_samples=1):
    return OpenSequenceGroup(
        sequence_group_id=GROUP,
        transfer_id=b"",
        request_id="r",
        prompt_token_ids=(1, 2, 3),
        options=RequestOptions(sampling=SamplingParams(seed=0, max_tokens=8)),
        samples=tuple(SampleStart(sample) for sample in range(num_samples)),
        traceparent=traceparent,
    )


def tokens(sample, *token_ids, num_draft_tokens=0, num_accepted=0):
    counts = SpeculationCounts(num_draft_tokens=num_draft_tokens, num_accepted_draft_tokens=num_accepted)
    return SampleTokens(GROUP, sample, 3, token_ids, speculation=counts)


def done(sample, reason=FinishReason.STOP):
    return SampleDone(sequence_group_id=GROUP, sample=sample, reason=reason)


def test_two_samples_are_one_span_with_counts(traces, tracer):
    passed_on = traces.open(SESSION, opened(num_samples=2))
    traces.observe(SESSION, [GRANTED, READY, tokens(0, 5), tokens(1, 6, 7, num_draft_tokens=4, num_accepted=1)])
    traces.observe_preempted([(SESSION, GROUP), (SESSION + 1, GROUP)])
    traces.observe(SESSION, [done(0), tokens(1, 8)])
    assert tracer.spans == [], "one still runs"
    traces.observe(SESSION, [done(1, FinishReason.LENGTH)])
    (span,) = tracer.spans
    assert (span.name, span.kind, span.error) == ("decode", "server", "")
    assert span.context.trace_id == TRACE_ID
    assert span.context.parent_id == CALLER_ID
    assert passed_on.traceparent == span.context.traceparent, "draft nodes record below it"
    assert span.attributes == {
        "gen_ai.request.id": "r",
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.response.finish_reasons": ["stop", "length"],
        "outrider.num_samples": 2,
        "outrider.num_steps": 3,
        "outrider.num_draft_tokens": 4,
        "outrider.num_accepted_draft_tokens": 1,
        "outrider.num_preemptions": 1,
    }
    events = [(event.name, dict(event.attributes)) for event in span.events]
    assert events == [
        ("granted", {"outrider.num_held_tokens": 16}),
        ("kv_ready", {"outrider.connector": "grpc", "outrider.kv_bytes": 99}),
        ("first_token", {}),
    ]
    traces.end_session(SESSION)
    assert len(tracer.spans) == 1


@pytest.mark.parametrize(
    ("event", "error"),
    [
        (Rejected(sequence_group_id=GROUP, reason=RejectReason.NO_ROOM, message="m"), "NO_ROOM"),
        (SequenceGroupFailed(sequence_group_id=GROUP, code=14, message="m"), "GROUP_FAILED"),
    ],
)
def test_a_group_that_the_node_gives_up_is_an_error(traces, tracer, event, error):
    traces.open(SESSION, opened())
    traces.observe(SESSION, [event])
    (span,) = tracer.spans
    assert span.error == error


def test_a_group_that_its_router_cancels_is_no_error(traces, tracer):
    traces.open(SESSION, opened(num_samples=3))
    traces.cancel(SESSION, CancelSequenceGroup(sequence_group_id=GROUP, samples=(0,)))
    traces.cancel(SESSION + 1, CancelSequenceGroup(sequence_group_id=GROUP))
    assert tracer.spans == []
    traces.cancel(SESSION, CancelSequenceGroup(sequence_group_id=GROUP))
    (span,) = tracer.spans
    assert span.error == ""
    assert [event.name for event in span.events] == ["cancelled", "cancelled"]


def test_a_session_that_ends_takes_its_groups_spans_along(traces, tracer):
    traces.open(SESSION, opened())
    traces.end_session(SESSION + 1)
    assert tracer.spans == []
    traces.end_session(SESSION)
    (span,) = tracer.spans
    assert span.error == "SESSION_ENDED"


def test_a_span_has_a_bounded_number_of_events(traces, tracer):
    traces.open(SESSION, opened())
    failed = KvFailed(sequence_group_id=GROUP, transfer_id=b"", message="m")
    traces.observe(SESSION, [GRANTED, failed] * MAX_EVENTS)
    traces.end_session(SESSION)
    assert len(tracer.spans[0].events) == MAX_EVENTS


@pytest.mark.parametrize("traceparent", [NOT_SAMPLED, *HOSTILE])
def test_what_is_not_traced_passes_as_it_came(traces, tracer, traceparent):
    command = opened(traceparent)
    assert traces.open(SESSION, command) is command
    traces.observe(SESSION, [GRANTED, done(0)])
    traces.end_session(SESSION)
    assert tracer.spans == []
