"""Records of requests: what they contain, in which order, and their limits."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from outrider.errors import InternalError, PeerLostError
from outrider.node import NodeLoad
from outrider.node_stamp import NodeVersion
from outrider.prefill import PrefillFigures
from outrider.service.telemetry.metrics import RouterMetrics
from outrider.session import Granted, KvReady, SampleTokens, SpeculationCounts
from outrider.v1 import prefill_pb2
from router.observe.records import Records, finish
from router.observe.spans import (
    MAX_DETAIL_CHARS,
    MAX_REQUEST_MOVES,
    MAX_REQUEST_SPANS,
    MAX_REQUEST_STEPS,
    TOKENS_PER_EXTRA_STEP,
    Span,
    SpanKind,
)
from tests.router.conftest import eventually

NODE = SimpleNamespace(name="decode-0", report=None, stamp=NodeVersion("decode-0", "decode", "fake", "exact (fake)"))
PREFILL = SimpleNamespace(name="prefill-0", stamp=NodeVersion("prefill-0", "prefill", "fake", "exact (fake)"))


@pytest.fixture(scope="module")
def metrics():
    return RouterMetrics(model_name="m", registry=CollectorRegistry())


def add_step(record, tokens):
    record.begin_attempt(NODE, num_known_tokens=3).take_tokens(tokens, len(tokens.token_ids), 1.0)


def add_steps(record, num_steps):
    for position in range(num_steps):
        add_step(record, SampleTokens(b"", 0, position, (7, 8)))


def test_the_newest_requests_are_kept_and_those_that_have_ended_are_forgotten_first(metrics):
    records = Records(3)
    running, *others = [records.begin(f"r{number}", metrics) for number in range(4)]
    assert [each.request_id for each in records] == ["r3", "r2", "r1"], "all run: the oldest one goes"
    records.end(running, None)
    assert len(list(records)) == 3, "a request that was forgotten does not come back at its end"
    records.end(others[2], None)
    records.end(others[0], None)
    records.begin("r4", metrics)
    assert [each.request_id for each in records] == ["r4", "r2", "r1"]
    assert records.find(others[0].serial) is others[0]
    assert records.find(others[2].serial) is None
    assert others[0].serial > running.serial >= 1


def test_a_requests_steps_spans_and_moves_are_bounded(metrics):
    record = Records(1).begin("r", metrics)
    add_steps(record, MAX_REQUEST_STEPS + 3)
    assert (len(record.steps), record.num_dropped_steps) == (MAX_REQUEST_STEPS, 3)
    for _ in range(MAX_REQUEST_SPANS + 1):
        record.begin_span(SpanKind.QUEUE).close()
        record.add_move("decode_lost", node="decode-0")
    assert (len(record.spans), len(record.moves)) == (MAX_REQUEST_SPANS, MAX_REQUEST_MOVES)
    assert record.num_moves == MAX_REQUEST_SPANS + 1


def test_words_of_nodes_are_cut(metrics):
    record, words = Records(1).begin("r", metrics), "x" * 1_000_000
    record.begin_span(SpanKind.OPEN).close(words)
    record.add_span(Span(SpanKind.KV_TRANSFER, 0.0, 0, detail=words))
    record.add_move("decode_lost", node="decode-0", error=PeerLostError(words))
    record.end(PeerLostError(words))
    told = [*(span.detail for span in record.spans), record.moves[0].error, record.error]
    assert [len(each) for each in told] == [MAX_DETAIL_CHARS] * 4


def test_refused_attempts_are_numbered_and_not_held(metrics):
    record = Records(1).begin("r", metrics)
    assert [record.begin_attempt(NODE, num_known_tokens=3).index for _ in range(3)] == [0, 1, 2]
    assert record.attempts == []


def grant(num_tokens_to_compute, *, kv_address="there"):
    return Granted(
        sequence_group_id=b"g",
        transfer_id=b"t",
        kv_address=kv_address,
        held_prefix_length=0,
        num_tokens_to_compute=num_tokens_to_compute,
    )


READY = KvReady(sequence_group_id=b"g", transfer_id=b"t", connector="tcp", kv_bytes=64, transfer_seconds=0.25)


def test_what_a_transfer_took_counts_where_it_filled_the_reservation(metrics):
    record = Records(1).begin("r", metrics)
    record.num_prompt_tokens = 10
    lost, filled = (record.begin_attempt(NODE, num_known_tokens=10) for _ in range(2))
    for attempt in (lost, filled):
        attempt.ask()
        attempt.take_grant(grant(1))
        figures = PrefillFigures(num_computed_tokens=6, compute_seconds=0.5, transfer_seconds=0.125)
        attempt.end_prefill(attempt.begin_prefill(PREFILL), figures)
    filled.take_ready(READY)
    summary = finish(record, (), num_longest=0)
    assert (summary.metrics.prefill_seconds, summary.metrics.kv_transfer.seconds) == (0.5, 0.125)
    assert (summary.metrics.kv_transfer.bytes, summary.usage.num_cached_tokens) == (64, 3)


def test_a_transfer_that_came_to_nothing_is_not_that_of_the_next_grant(metrics):
    record = Records(1).begin("r", metrics)
    record.num_prompt_tokens = 10
    attempt = record.begin_attempt(NODE, num_known_tokens=10)
    attempt.ask()
    attempt.take_grant(grant(1))
    attempt.end_prefill(attempt.begin_prefill(PREFILL), PrefillFigures(num_computed_tokens=9, compute_seconds=0.5))
    attempt.ask("for another transfer")
    attempt.take_grant(grant(8, kv_address=""))
    attempt.take_tokens(SampleTokens(b"g", 0, 10, (7,)), 1, 1.0)
    summary = finish(record, (), num_longest=1)
    assert (summary.metrics.prefill_seconds, summary.usage.num_cached_tokens) == (0.0, 2)
    assert [span.end is None for span in record.spans if span.kind == "open"] == [False, False]


def test_what_a_node_says_of_an_invalid_request_may_quote_it_and_is_not_kept(metrics):
    record = Records(1).begin("r", metrics)
    record.end(InternalError("decode node decode-0 rejected the request as invalid: regex 'my secret' is not closed"))
    assert record.error == "INTERNAL: see the router's log"


def test_steps_of_all_requests_are_bounded_and_room_comes_from_the_request_that_ended_first(metrics):
    records = Records(8, max_steps=10)
    first, second, third = [records.begin(name, metrics) for name in "abc"]
    add_steps(first, 4)
    add_steps(second, 4)
    records.end(second, None)
    records.end(first, None)
    add_steps(third, 5)
    assert [each.request_id for each in records] == ["c", "a"]
    assert (len(third.steps), third.num_dropped_steps) == (5, 0)
    add_steps(third, 8)
    assert [each.request_id for each in records] == ["c"]
    assert (len(third.steps), third.num_dropped_steps) == (10, 3), "only its own steps are left"
    records.end(third, None)
    fourth = records.begin("d", metrics)
    add_steps(fourth, 10)
    assert (len(fourth.steps), fourth.num_dropped_steps) == (10, 0), "all room has come back"


def test_tokens_that_are_kept_take_room(metrics):
    records = Records(8, max_steps=10, records_tokens=True)
    first, second = [records.begin(name, metrics) for name in "ab"]
    long = SampleTokens(b"g", 0, 0, (7,), rejected_draft_token_ids=(8,) * (6 * TOKENS_PER_EXTRA_STEP))
    for record in (first, second):
        add_step(record, long)
    assert (len(first.steps), len(second.steps), second.num_dropped_steps) == (1, 0, 1)
    records.end(first, None)
    add_step(second, long)
    assert (len(first.steps), len(second.steps)) == (0, 1)
    add_steps(second, 4)
    assert (len(second.steps), second.num_dropped_steps) == (4, 2)


def test_a_step_says_what_became_of_its_draft(metrics):
    record = Records(1).begin("r", metrics)
    counts = SpeculationCounts(num_spec_steps=1, num_draft_tokens=4, num_accepted_draft_tokens=2, num_wanting_steps=1)
    node = SimpleNamespace(name="decode-1", report=SimpleNamespace(load=NodeLoad(num_running=5)))
    record.begin_attempt(NODE, num_known_tokens=3)
    attempt = record.begin_attempt(node, num_known_tokens=3)
    attempt.take_tokens(SampleTokens(b"", 1, 242, (5, 6, 7), (), counts), 3, 2.5)
    step = record.steps[0]
    assert (step.sample, step.attempt, step.at, step.position, step.num_tokens, step.batch) == (1, 1, 2.5, 242, 3, 5)
    assert step.node == "decode-1"
    assert (step.num_draft_tokens, step.num_accepted, step.wanted_drafts, step.found_drafts) == (4, 2, True, False)


async def test_chunks_and_frames_of_a_prefill_node_are_placed_within_the_routers_call(cluster):
    chunks = [
        prefill_pb2.ComputedChunk(start_microseconds=1_000, end_microseconds=2_000, num_tokens=5),
        prefill_pb2.ComputedChunk(start_microseconds=2_000, end_microseconds=2**63, num_tokens=2),
    ]
    pushed = [prefill_pb2.PushedKv(start_microseconds=1_500, end_microseconds=1_400, kv_bytes=64)]
    cluster.prefill.prefill_seconds = 0.02
    cluster.prefill.times = prefill_pb2.PrefillResponse(call_microseconds=10_000, chunks=chunks, pushed=pushed)
    await cluster.serve()
    await cluster.generate()
    (record,) = cluster.context.records
    (call,) = [span for span in record.spans if span.kind == "prefill"]
    first, second = [span for span in record.spans if span.kind == "prefill_chunk"]
    (frame,) = [span for span in record.spans if span.kind == "kv_frame"]
    offset = (call.end - call.start - 0.01) / 2
    assert offset > 0.004
    assert first.start - call.start == pytest.approx(offset + 0.001, abs=1e-3)
    assert first.end - first.start == pytest.approx(0.001)
    assert (first.num_tokens, first.node, first.attempt) == (5, "prefill-0", 0)
    assert (second.end, frame.end) == (pytest.approx(call.end, abs=1e-3), frame.start), "a node may say anything"
    assert (frame.num_bytes, frame.num_tokens, second.num_tokens) == (64, None, 2)


async def test_a_request_that_moves_says_when_why_and_where_it_went_on(node_pair):
    await node_pair.serve()
    task, busy, free = await node_pair.begin(100)
    await busy.break_sessions()
    await node_pair.finish(task)
    (record,) = node_pair.context.records
    (move,) = record.moves
    assert (move.cause, move.node, record.num_moves) == ("decode_lost", busy.name, 1)
    assert (record.num_attempts, record.attempts) == (2, []), "the work of a request that has ended is not held"
    assert move.error
    lost, second = [span for span in record.spans if span.kind == "decode"]
    assert (lost.attempt, lost.node, second.attempt, second.node) == (0, busy.name, 1, free.name)
    assert lost.detail.startswith("decode_lost: ")
    assert lost.end <= move.at <= second.start
    assert lost.num_tokens + second.num_tokens == 100
    assert [step.attempt for step in record.steps] == [0] * lost.num_tokens + [1] * second.num_tokens


async def test_a_request_of_a_client_that_left_is_aborted_and_one_that_waits_is_waiting(cluster):
    cluster.decode.answers_opens = False
    await cluster.serve()
    records = cluster.context.records
    call = cluster.stub.Generate(cluster.request())
    await eventually(lambda: cluster.decode.opened)
    (record,) = records
    assert record.state == "waiting"
    assert record.spans[-1].kind == "open"
    assert record.spans[-1].end is None
    call.cancel()
    await cluster.is_empty()
    await eventually(lambda: record.state == "aborted")
    assert record.spans[-1].detail == "given up"
    assert all(span.end is not None for span in record.spans)


async def test_a_request_that_fails_says_why(cluster):
    cluster.decode.fails_opens = True
    await cluster.serve()
    failure = await cluster.fail()
    (record,) = cluster.context.records
    assert (record.state, record.error) == ("failed", failure.message)
    spans = [span.detail for span in record.spans if span.kind == "open"]
    assert len(spans) == record.num_attempts > 1
    assert all(detail.startswith("group_failed: ") for detail in spans)


@pytest.mark.parametrize("shows_text", [False, True])
async def test_a_request_that_was_refused_before_it_began_is_there_too_and_is_not_quoted(cluster, shows_text):
    cluster.shows_text = shows_text
    await cluster.serve()
    failure = await cluster.fail(regex="secret(")
    assert "secret" in failure.message
    (record,) = cluster.context.records
    assert record.state == "failed"
    assert record.error == (failure.message if shows_text else f"{failure.reason}: {failure.field}")
    assert [span.kind for span in record.spans] == ["encode"]


def test_what_raises_while_a_request_begins_ends_its_record(metrics):
    records = Records(1)
    with pytest.raises(PeerLostError), records.beginning("r", metrics) as record:
        raise PeerLostError("no node")
    assert (record.state, record.error) == ("failed", "no node")
    with pytest.raises(asyncio.CancelledError), records.beginning("r", metrics) as record:
        raise asyncio.CancelledError
    assert record.state == "aborted"
