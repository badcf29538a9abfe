"""A client gets the values that its router sent."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from outrider.answer import (
    CompleteResult,
    Completion,
    Delta,
    Finished,
    KvTransferMetrics,
    RequestMetrics,
    SpeculationMetrics,
    Started,
    Summary,
    Usage,
)
from outrider.request import FinishReason, TokenLogprobs
from outrider.v1 import router_pb2
from outrider.wire.answer import (
    CompleteResponseBuilder,
    complete_from_proto,
    event_from_proto,
    event_to_proto,
    logprobs_from_proto,
    token_logprobs_to_proto,
)

LOGPROBS = (
    TokenLogprobs(7, -0.5, 2, ((3, -0.25), (7, -0.5))),
    TokenLogprobs(9, -1.0, 1),
    TokenLogprobs(9, -1.0, 1, ((9, -1.0), (2, -3.0)), b"\xf0", (b"\xf0", b"")),
)
STARTED = Started(
    request_id="r", num_prompt_tokens=3, seed=2**64 - 1, model="m", router="here:1", prompt_logprobs=LOGPROBS
)
SUMMARY = Summary(
    request_id="r",
    usage=Usage(num_prompt_tokens=1, num_cached_tokens=2, num_generated_tokens=3),
    metrics=RequestMetrics(
        queue_seconds=0.1,
        ttft_seconds=0.2,
        e2e_seconds=0.3,
        prefill_seconds=0.4,
        kv_transfer=KvTransferMetrics(connector="grpc", bytes=5, seconds=0.6, exposed_seconds=0.7),
        speculation=SpeculationMetrics(
            num_spec_steps=8,
            num_draft_tokens=9,
            num_accepted_draft_tokens=10,
            draft_acceptance_rate=0.11,
            mean_acceptance_length=1.2,
            acceptance_histogram=(1, 3),
            look_ahead_hit_rate=0.14,
        ),
        attempts=15,
        nodes=("decode-0", "prefill-0"),
    ),
)
ENDS = (
    Finished(0, FinishReason.STOP, stop_token_id=0),
    Finished(1, FinishReason.STOP, stop_string="END"),
    Finished(1, FinishReason.LENGTH),
    Finished(0, FinishReason.ABORTED),
)


@pytest.mark.parametrize(
    "event", [STARTED, Delta(0, 3, (1, 2), "ab", LOGPROBS), Delta(2, 9, (), "c"), *ENDS, SUMMARY], ids=repr
)
def test_an_event_survives_the_wire(event):
    data = event_to_proto(event).SerializeToString()
    assert event_from_proto(router_pb2.GenerateResponse.FromString(data)) == event


def test_only_started_and_summary_carry_the_request_id():
    messages = [event_to_proto(event) for event in (STARTED, Delta(0, 3, (1,), "a"), ENDS[0], SUMMARY)]
    assert [message.request_id for message in messages] == ["r", "", "", "r"]


def test_an_answer_at_once_is_its_events_put_together():
    events = [
        STARTED,
        Delta(1, 3, (1,), "x"),
        Delta(0, 3, (2,), "a", LOGPROBS[:1]),
        Delta(0, 4, (4,), "b", LOGPROBS[1:]),
    ]
    events += [ENDS[0], ENDS[1], SUMMARY]
    builder = CompleteResponseBuilder(2)
    for event in events:
        builder.add(event)
    data = builder.build().SerializeToString()
    assert len(data) <= builder.num_bytes <= len(data) + 256
    assert complete_from_proto(router_pb2.CompleteResponse.FromString(data)) == CompleteResult(
        request_id="r",
        started=STARTED,
        completions=(
            Completion(text="ab", token_ids=(2, 4), finished=ENDS[0], logprobs=LOGPROBS),
            Completion(text="x", token_ids=(1,), finished=ENDS[1]),
        ),
        summary=SUMMARY,
    )


def test_a_logprob_that_there_is_not_is_unset_on_the_wire():
    first = TokenLogprobs(5, math.nan, 0)
    proto = token_logprobs_to_proto(first)
    assert not proto.HasField("logprob")
    (read,) = logprobs_from_proto([proto])
    assert math.isnan(read.logprob)
    assert replace(read, logprob=0.0) == replace(first, logprob=0.0)


def test_what_a_later_router_may_say_is_no_error():
    later = router_pb2.GenerateResponse(finished=router_pb2.Finished(reason=99, sample=1))
    assert event_from_proto(later) == Finished(1, FinishReason.ABORTED)
    assert event_from_proto(router_pb2.GenerateResponse(request_id="r")) is None
