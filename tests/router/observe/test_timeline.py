"""Timelines: what is recorded of a request, in which order, and how little of it is kept."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from outrider.errors import InternalError, PeerLostError
from outrider.session import Rejected, RejectReason, SampleTokens, SpeculationCounts
from outrider.v1 import prefill_pb2, router_pb2
from router.observe.request_figures import RequestFigures
from router.observe.timeline import (
    MAX_REQUEST_MOVES,
    MAX_REQUEST_SPANS,
    MAX_REQUEST_STEPS,
    MAX_WORDS,
    TOKENS_OF_A_STEP,
    Span,
    SpanKind,
)
from router.observe.timelines import Timelines
from router.requests.work import Refused, describe
from tests.router.conftest import eventually


def add_steps(timeline, num_steps):
    for position in range(num_steps):
        timeline.add_step(SampleTokens(b"", 0, position, (7, 8)), at=1.0, attempt=0, batch=1)


def test_the_newest_requests_are_kept_and_those_that_have_ended_are_forgotten_first():
    timelines = Timelines(3)
    running, *others = [timelines.begin(f"r{number}") for number in range(4)]
    assert [each.request_id for each in timelines] == ["r3", "r2", "r1"], "all run: the oldest one goes"
    timelines.end(running, None)
    assert len(list(timelines)) == 3, "a request that was forgotten does not come back at its end"
    timelines.end(others[2], None)
    timelines.end(others[0], None)
    timelines.begin("r4")
    assert [each.request_id for each in timelines] == ["r4", "r2", "r1"]
    assert timelines.find(others[0].serial) is others[0]
    assert timelines.find(others[2].serial) is None
    assert others[0].serial > running.serial >= 1


def test_a_requests_steps_spans_and_moves_are_bounded():
    timeline = Timelines(1).begin("r")
    add_steps(timeline, MAX_REQUEST_STEPS + 3)
    assert (len(timeline.steps), timeline.num_dropped_steps) == (MAX_REQUEST_STEPS, 3)
    for _ in range(MAX_REQUEST_SPANS + 1):
        timeline.begin(SpanKind.QUEUE).close()
        timeline.add_move("decode_lost", node="decode-0", error="")
    assert (len(timeline.spans), len(timeline.moves)) == (MAX_REQUEST_SPANS, MAX_REQUEST_MOVES)
    assert timeline.num_moves == MAX_REQUEST_SPANS + 1


def test_words_of_nodes_are_cut():
    timeline, words = Timelines(1).begin("r"), "x" * 1_000_000
    timeline.begin(SpanKind.OPEN).close(words)
    timeline.add_span(Span(SpanKind.KV_TRANSFER, 0.0, 0, detail=words))
    timeline.add_move("decode_lost", node="decode-0", error=words)
    timeline.end(PeerLostError(words))
    told = [*(span.detail for span in timeline.spans), timeline.moves[0].error, timeline.error]
    assert [len(each) for each in told] == [MAX_WORDS] * 4


def test_refused_attempts_are_numbered_and_not_held():
    figures = RequestFigures(None, None, Timelines(1).begin("r"))
    node = SimpleNamespace(name="decode-0")
    assert [figures.begin_attempt(node, num_known_tokens=3).index for _ in range(3)] == [0, 1, 2]
    assert figures.attempts == []


def test_what_a_node_says_of_an_invalid_request_may_quote_it_and_is_not_kept():
    timeline = Timelines(1).begin("r")
    span = timeline.begin(SpanKind.OPEN)
    refused = Refused(
        Rejected(sequence_group_id=b"g", reason=RejectReason.INVALID, message="regex 'my secret' is not closed")
    )
    span.close(describe(refused))
    timeline.end(InternalError("decode node decode-0 calls the request invalid: regex 'my secret' is not closed"))
    assert (span.detail, timeline.error) == ("INVALID", "INTERNAL: the router's log says more")


def test_steps_of_all_requests_are_bounded_and_room_comes_from_the_request_that_ended_first():
    timelines = Timelines(8, max_steps=10)
    first, second, third = [timelines.begin(name) for name in "abc"]
    add_steps(first, 4)
    add_steps(second, 4)
    timelines.end(second, None)
    timelines.end(first, None)
    add_steps(third, 5)
    assert [each.request_id for each in timelines] == ["c", "a"]
    assert (len(third.steps), third.num_dropped_steps) == (5, 0)
    add_steps(third, 8)
    assert [each.request_id for each in timelines] == ["c"]
    assert (len(third.steps), third.num_dropped_steps) == (10, 3), "only its own steps are left"
    timelines.end(third, None)
    fourth = timelines.begin("d")
    add_steps(fourth, 10)
    assert (len(fourth.steps), fourth.num_dropped_steps) == (10, 0), "all room has come back"


def test_tokens_that_are_kept_take_room():
    timelines = Timelines(8, max_steps=10, keeps_tokens=True)
    first, second = [timelines.begin(name) for name in "ab"]
    long = SampleTokens(b"g", 0, 0, (7,), rejected_draft_token_ids=(8,) * (6 * TOKENS_OF_A_STEP))
    for timeline in (first, second):
        timeline.add_step(long, at=0.0, attempt=0, batch=1)
    assert (len(first.steps), len(second.steps), second.num_dropped_steps) == (1, 0, 1)
    timelines.end(first, None)
    second.add_step(long, at=0.0, attempt=0, batch=1)
    assert (len(first.steps), len(second.steps)) == (0, 1)
    add_steps(second, 4)
    assert (len(second.steps), second.num_dropped_steps) == (4, 2)


def test_none_are_kept_where_the_setting_is_0():
    timelines = Timelines(0)
    timeline = timelines.begin("r")
    add_steps(timeline, 2)
    timelines.end(timeline, None)
    assert list(timelines) == []
    assert timeline.steps == []


@pytest.mark.parametrize(("keeps_tokens", "expected"), [(False, ()), (True, (7, 8))])
def test_token_ids_are_kept_only_where_text_may_be_shown(keeps_tokens, expected):
    timeline = Timelines(1, keeps_tokens=keeps_tokens).begin("r")
    add_steps(timeline, 1)
    assert timeline.steps[0].token_ids == expected
    assert timeline.steps[0].num_tokens == 2


def test_a_step_says_what_became_of_its_draft():
    timeline = Timelines(1).begin("r")
    counts = SpeculationCounts(num_spec_steps=1, num_draft_tokens=4, num_accepted_draft_tokens=2, num_wanting_steps=1)
    timeline.add_step(SampleTokens(b"", 1, 242, (5, 6, 7), (), counts), at=2.5, attempt=3, batch=5)
    step = timeline.steps[0]
    assert (step.sample, step.attempt, step.at, step.position, step.num_tokens, step.batch) == (1, 3, 2.5, 242, 3, 5)
    assert (step.num_draft_tokens, step.num_accepted, step.wanted_drafts, step.found_drafts) == (4, 2, True, False)


async def test_a_request_is_recorded_from_its_arrival_to_its_end(serving):
    serving.decode.tokens_per_step, serving.decode.accepted_drafts_per_step = 3, 2
    answer = await serving.generate(request_id="r", max_tokens=9)
    (timeline,) = serving.services.timelines
    metrics = answer.summary.metrics
    assert (timeline.request_id, timeline.state) == ("r", "finished")
    assert timeline.first_token_at - timeline.arrived_at == pytest.approx(metrics.ttft_seconds, abs=1e-5)
    assert (timeline.num_prompt_tokens, timeline.num_samples) == (answer.started.num_prompt_tokens, 1)
    assert (timeline.num_generated_tokens, list(timeline.nodes)) == (9, ["decode-0", "prefill-0"])
    spans = {span.kind: span for span in timeline.spans}
    assert list(spans) == ["encode", "queue", "open", "prefill", "kv_transfer", "decode"]
    assert all(timeline.arrived_at <= span.start <= span.end for span in spans.values())
    assert spans["queue"].end <= spans["open"].start <= spans["open"].end <= spans["prefill"].start
    assert spans["decode"].start >= spans["open"].end
    assert {spans[kind].node for kind in ("open", "kv_transfer", "decode")} == {"decode-0"}
    assert (spans["prefill"].node, spans["decode"].num_tokens, spans["encode"].node) == ("prefill-0", 9, "")
    steps = timeline.steps
    assert [step.position - steps[0].position for step in steps] == [0, 3, 6]
    assert [(step.num_tokens, step.num_accepted) for step in steps] == [(3, 2)] * 3
    assert timeline.first_token_at == steps[0].at <= steps[1].at <= steps[2].at <= timeline.ended_at


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
    (timeline,) = cluster.services.timelines
    (call,) = [span for span in timeline.spans if span.kind == "prefill"]
    first, second = [span for span in timeline.spans if span.kind == "prefill_chunk"]
    (frame,) = [span for span in timeline.spans if span.kind == "kv_frame"]
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
    (timeline,) = node_pair.services.timelines
    (move,) = timeline.moves
    assert (move.cause, move.node, timeline.num_moves) == ("decode_lost", busy.name, 1)
    assert timeline.attempts == [busy.name, free.name]
    assert move.error
    lost, second = [span for span in timeline.spans if span.kind == "decode"]
    assert (lost.attempt, lost.node, second.attempt, second.node) == (0, busy.name, 1, free.name)
    assert lost.detail.startswith("decode_lost: ")
    assert lost.end <= move.at <= second.start
    assert lost.num_tokens + second.num_tokens == 100
    assert [step.attempt for step in timeline.steps] == [0] * lost.num_tokens + [1] * second.num_tokens


async def test_a_request_of_a_client_that_left_is_aborted_and_one_that_waits_is_waiting(cluster):
    cluster.decode.answers_opens = False
    await cluster.serve()
    timelines = cluster.services.timelines
    call = cluster.stub.Generate(cluster.request())
    await eventually(lambda: cluster.decode.opened)
    (timeline,) = timelines
    assert timeline.state == "waiting"
    assert timeline.spans[-1].kind == "open"
    assert timeline.spans[-1].end is None
    call.cancel()
    await cluster.is_empty()
    await eventually(lambda: timeline.state == "aborted")
    assert timeline.spans[-1].detail == "given up"
    assert all(span.end is not None for span in timeline.spans)


async def test_a_request_that_fails_says_why(cluster):
    cluster.decode.gives_up_opens = True
    await cluster.serve()
    failure = await cluster.fail()
    (timeline,) = cluster.services.timelines
    assert (timeline.state, timeline.error) == ("failed", failure.message)
    spans = [span.detail for span in timeline.spans if span.kind == "open"]
    assert len(spans) == len(timeline.attempts) > 1
    assert all(detail.startswith("group_failed: ") for detail in spans)


@pytest.mark.parametrize("shows_text", [False, True])
async def test_a_request_that_was_refused_before_it_began_is_there_too_and_is_not_quoted(cluster, shows_text):
    cluster.shows_text = shows_text
    await cluster.serve()
    failure = await cluster.fail(regex="secret(")
    assert "secret" in failure.message
    (timeline,) = cluster.services.timelines
    assert timeline.state == "failed"
    assert timeline.error == (failure.message if shows_text else f"{failure.reason}: {failure.field}")
    assert [span.kind for span in timeline.spans] == ["encode"]


async def test_an_aborted_request_is_aborted(serving):
    serving.decode.step_seconds = 0.005
    task = asyncio.ensure_future(serving.generate(request_id="r", max_tokens=500))
    await eventually(lambda: serving.decode.most_sent > 3)
    (timeline,) = serving.services.timelines
    assert timeline.state == "running"
    await serving.stub.Abort(router_pb2.AbortRequest(request_id="r"))
    await task
    assert timeline.state == "aborted"


def test_what_raises_while_a_request_begins_ends_its_timeline():
    timelines = Timelines(1)
    with pytest.raises(PeerLostError), timelines.beginning("r") as timeline:
        raise PeerLostError("no node")
    assert (timeline.state, timeline.error) == ("failed", "no node")
    with pytest.raises(asyncio.CancelledError), timelines.beginning("r") as timeline:
        raise asyncio.CancelledError
    assert timeline.state == "aborted"
