"""A drafted sequence's span, on the draft node's stream."""

from __future__ import annotations

import pytest

from draft_node import sequence_traces
from draft_node.sequence_traces import SequenceTraces
from outrider.request import RequestOptions, SamplingParams
from outrider.speculation.draft_stream import DraftStatus, SequenceProposals, SequenceStart, SequenceUpdate
from outrider.speculation.draft_tree import DraftTree
from tests.support.traces import CALLER_ID, HOSTILE, NOT_SAMPLED, TRACE_ID, TRACEPARENT, KeptSpans


@pytest.fixture
def tracer():
    return KeptSpans()


@pytest.fixture
def traces(tracer):
    return SequenceTraces(tracer)


def update(sequence_id=1, traceparent=TRACEPARENT, **fields):
    start = SequenceStart(
        options=RequestOptions(sampling=SamplingParams(seed=0, max_tokens=8)),
        sample=0,
        prompt_length=2,
        traceparent=traceparent,
    )
    return SequenceUpdate(sequence_id, start, **fields)


def answer(status, *branches):
    return SequenceProposals(1, status, branches=tuple(DraftTree(2, 0, token_ids) for token_ids in branches))


def test_a_sequence_is_one_span_with_counts(traces, tracer):
    traces.take_updates([update()])
    traces.take_answers([answer(DraftStatus.CATCHING_UP), answer(DraftStatus.PROPOSED, (5, 6))])
    traces.take_updates([update(), SequenceUpdate(1, start_length=3, token_ids=(4,))])  # begins with a repeated start
    traces.take_answers([answer(DraftStatus.AHEAD, (7,), (8, 9)), answer(DraftStatus.PROPOSED, (7,))])
    traces.take_answers([SequenceProposals(2, DraftStatus.PROPOSED), answer(DraftStatus.UNKNOWN_PREFIX)])
    assert tracer.spans == []
    traces.take_updates([SequenceUpdate(1, closed=True)])
    (span,) = tracer.spans
    assert (span.name, span.kind, span.error) == ("draft", "server", "")
    assert (span.context.trace_id, span.context.parent_id) == (TRACE_ID, CALLER_ID)
    assert span.attributes == {
        "outrider.num_proposals": 2,
        "outrider.num_proposed_tokens": 3,
        "outrider.num_ahead_tokens": 3,
        "outrider.num_catch_ups": 1,
        "outrider.num_refusals": 1,
    }
    assert [event.name for event in span.events] == ["first_proposal"]
    traces.end()
    assert len(tracer.spans) == 1


def test_a_stream_that_ends_takes_its_sequences_spans_along(traces, tracer):
    traces.take_updates([update(1), update(2)])
    traces.end()
    assert [span.error for span in tracer.spans] == ["STREAM_ENDED"] * 2


def test_sequences_that_are_followed_are_bounded(traces, tracer, monkeypatch):
    monkeypatch.setattr(sequence_traces, "MAX_TRACED", 3)
    traces.take_updates([update(number) for number in range(10)])
    traces.end()
    assert len(tracer.spans) == 3


@pytest.mark.parametrize("traceparent", [NOT_SAMPLED, *HOSTILE])
def test_what_is_not_traced_is_no_span(traces, tracer, traceparent):
    traces.take_updates([update(traceparent=traceparent)])
    traces.take_answers([answer(DraftStatus.PROPOSED, (5,))])
    traces.end()
    assert tracer.spans == []
