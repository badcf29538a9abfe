"""The spans of a Prefill call that fails. tests/e2e/test_traces.py has those of one that succeeds."""

from __future__ import annotations

import asyncio

import pytest

from outrider.errors import CapacityError
from outrider.prefill import PrefillCall
from outrider.request import RequestOptions, SamplingParams
from prefill_node.servicer import traced
from tests.support.traces import TRACEPARENT, KeptSpans

CALL = PrefillCall(
    sequence_group_id=b"g" * 16, transfer_id=b"t" * 16, request_id="r", token_ids=(1, 2), kv_address="127.0.0.1:1",
    decode_incarnation=b"d", held_prefix_length=0, fingerprint="f",
    options=RequestOptions(sampling=SamplingParams(seed=1, max_tokens=1)),
)  # fmt: skip


@pytest.mark.parametrize(
    ("raised", "error", "events"),
    [
        (asyncio.CancelledError(), "", ["cancelled"]),
        (CapacityError("full", reason="QUEUE_FULL"), "QUEUE_FULL", []),
        (KeyError("a bug"), "KeyError", []),
    ],
    ids=["given up", "refused", "bug"],
)
async def test_a_call_that_its_router_gives_up_is_no_error_and_others_say_why(raised, error, events):
    tracer = KeptSpans()

    async def job():
        raise raised

    with pytest.raises(type(raised)):
        await traced(tracer, CALL, [("traceparent", TRACEPARENT)], job())
    (span,) = tracer.spans
    assert (span.name, span.error, [event.name for event in span.events]) == ("prefill", error, events)
