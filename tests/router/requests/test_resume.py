"""Clients that resume: they get every token once, from any position, until the resume window ends."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from outrider.client import AsyncClient, RetryPolicy
from router.requests import answer as answer_module
from tests.router.conftest import read_rest, refused, told
from tests.support.router_fakes.decode_node import letters

NUM_TOKENS = 120


def request(cluster, *, seconds=30.0, **fields):
    return cluster.resumable(seconds=seconds, **{"max_tokens": NUM_TOKENS} | fields)


async def read_some(call, num_deltas):
    """Returns (Started, the first deltas). The stream stays open."""
    return (await call.read()).started, [(await call.read()).delta for _ in range(num_deltas)]


async def resume(cluster, next_positions=None):
    call = cluster.resume_call(next_positions)
    first = await call.read()
    cluster.decode.step_seconds = 0.0  # the stream is attached, so the rest may come at once
    return [first, *await read_rest(call)]


async def refusal(cluster, next_positions=None):
    return await refused(cluster.resume_call(next_positions))


def text_of(messages, sample=0):
    return "".join(message.delta.text for message in messages if message.delta.sample == sample)


@pytest.fixture
async def slow(cluster):
    """A cluster in which an answer takes six seconds until it is resumed, so that it runs while a test acts on it."""
    cluster.decode.step_seconds = 0.05
    return await cluster.serve()


@pytest.mark.parametrize("when", ["while it runs", "after its end"])
async def test_a_stream_that_was_cut_goes_on_where_it_was(slow, when):
    call = slow.stub.Generate(request(slow))
    started, deltas = await read_some(call, 5)
    call.cancel()
    position = deltas[-1].start_position + len(deltas[-1].token_ids)
    if when == "after its end":
        slow.decode.step_seconds = 0.0
        await slow.eventually(lambda: not slow.decode.groups)
    messages = await resume(slow, {0: position})
    assert messages[0].started == started
    assert messages[-1].summary.usage.num_generated_tokens == NUM_TOKENS
    assert [m.WhichOneof("event") for m in messages[-2:]] == ["finished", "summary"]
    seen = [token_id for delta in deltas for token_id in delta.token_ids]
    assert messages[1].delta.start_position == position
    assert seen + told(messages) == letters(slow.decode.opened[0], 0)
    assert "".join(delta.text for delta in deltas) + text_of(messages) == bytes(seen + told(messages)).decode()


async def test_an_answer_can_be_read_more_than_once_and_from_the_beginning(slow):
    slow.decode.step_seconds = 0.0
    whole = await read_rest(slow.stub.Generate(request(slow, n=2, max_tokens=30)))
    start = whole[0].started.num_prompt_tokens
    for _ in range(2):
        again = await resume(slow)
        assert [told(again, 0), told(again, 1)] == [told(whole, 0), told(whole, 1)]
        assert [text_of(again, 0), text_of(again, 1)] == [text_of(whole, 0), text_of(whole, 1)]
        assert again[-1] == whole[-1]
    part = await resume(slow, {1: start + 10})
    assert told(part, 0) == told(whole, 0)
    assert told(part, 1) == told(whole, 1)[10:]


async def test_positions_that_are_not_there_are_out_of_range(slow):
    call = slow.stub.Generate(request(slow))
    _, deltas = await read_some(call, 3)
    call.cancel()
    start = deltas[0].start_position
    for positions in ({0: start - 1}, {0: start + NUM_TOKENS + 1}, {1: start}):
        assert (await refusal(slow, positions)).code is grpc.StatusCode.OUT_OF_RANGE
    assert told(await resume(slow, {0: start + 1})) == letters(slow.decode.opened[0], 0)[1:]


async def test_a_refused_resume_leaves_the_attached_stream_alone(slow):
    task = asyncio.ensure_future(slow.generate(request(slow)))
    await slow.eventually(lambda: slow.decode.groups)
    assert (await refusal(slow, {7: 0})).code is grpc.StatusCode.OUT_OF_RANGE
    slow.decode.step_seconds = 0.0
    assert len((await task).token_ids()) == NUM_TOKENS


async def test_what_is_unknown_or_not_resumable_is_not_found(slow):
    assert (await refusal(slow)).reason == "REQUEST_NOT_FOUND"
    call = slow.stub.Generate(slow.request(request_id="r", max_tokens=NUM_TOKENS))
    await read_some(call, 1)
    failure = await refusal(slow)
    assert (failure.code, failure.reason) == (grpc.StatusCode.NOT_FOUND, "NOT_RESUMABLE")
    call.cancel()
    await slow.is_empty()


async def test_the_window_begins_when_the_client_is_gone_and_its_end_frees_everything(slow):
    call = slow.stub.Generate(request(slow, seconds=0.3, max_tokens=400))
    await read_some(call, 2)
    call.cancel()
    await slow.is_empty(seconds=10.0)  # half of the time that the answer would have taken
    assert (await refusal(slow)).code is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("seconds", [0.0, 0.1])
async def test_the_end_of_the_window_frees_the_name_and_the_memory_of_an_answer_that_was_read(slow, seconds):
    answer = await slow.generate(request(slow, seconds=seconds, max_tokens=5))
    assert len(answer.token_ids()) == 5
    await slow.is_empty()


async def test_the_name_is_taken_while_the_answer_is_resumable_and_its_memory_is_held(slow):
    await slow.generate(request(slow, max_tokens=5))
    failure = await slow.fail(request(slow))
    assert failure.code is grpc.StatusCode.ALREADY_EXISTS
    assert slow.context.answers.reserved_bytes > 0


async def test_answers_that_were_read_give_way_to_new_ones(cluster):
    await cluster.serve(answer_memory_bytes=65_536)
    for index in range(20):
        answer = await cluster.generate(cluster.resumable(request_id=f"r{index}", max_tokens=20))
        assert len(answer.token_ids()) == 20
        assert cluster.context.answers.reserved_bytes <= 65_536


async def test_answers_that_nobody_reads_stay_within_their_budget(cluster):
    await cluster.serve(answer_memory_bytes=65_536)

    async def start_a_hundred():
        for index in range(100):
            call = cluster.stub.Generate(cluster.resumable(request_id=f"r{index}", max_tokens=100))
            await call.read()
            call.cancel()

    failure = await refused(start_a_hundred())
    assert (failure.code, failure.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "JOURNAL_FULL")
    assert 0 < cluster.context.answers.reserved_bytes <= 65_536


async def test_an_answer_that_failed_fails_for_who_comes_back_too(cluster):
    cluster.decode.step_seconds = 0.01
    await cluster.serve(no_node_timeout_seconds=0.3)
    call = cluster.stub.Generate(request(cluster))
    await read_some(call, 2)
    call.cancel()
    await cluster.decode.stop()
    for _ in range(2):
        assert (await refusal(cluster)).code is grpc.StatusCode.UNAVAILABLE


async def test_a_resumable_request_that_was_refused_leaves_its_name(cluster):
    """A client may retry with the same request id, as the Python client does."""
    cluster.decode.max_running = 1
    cluster.decode.step_seconds = 0.05
    await cluster.serve(max_waiting=0)
    running = asyncio.ensure_future(cluster.generate(max_tokens=400))
    await cluster.eventually(lambda: cluster.decode.groups)
    assert (await cluster.fail(request(cluster))).reason == "QUEUE_FULL"
    assert len(cluster.service.requests) == 1
    retry = RetryPolicy(max_attempts=100, initial_backoff_seconds=0.05)
    async with AsyncClient(cluster.address, retry=retry) as client:
        options = {"seed": 1, "max_tokens": 4, "request_id": "r", "resume_window_seconds": 30.0}
        async with client.generate("a prompt", **options) as stream:
            first = asyncio.ensure_future(anext(aiter(stream)))
            await cluster.eventually(lambda: len(cluster.service.requests) == 2)
            await cluster.eventually(lambda: len(cluster.service.requests) == 1)
            cluster.decode.step_seconds = 0.0
            await first
            async for _ in stream:
                pass
            assert len(stream.token_ids()) == 4
    await running


async def test_a_long_answer_is_told_again_in_bounded_messages(slow, monkeypatch):
    monkeypatch.setattr(answer_module, "MAX_ENTRIES", 64)
    slow.decode.step_seconds = 0.0
    await slow.stub.Complete(request(slow))
    messages = await resume(slow)
    deltas = [message.delta for message in messages if message.HasField("delta")]
    assert max(len(delta.token_ids) for delta in deltas) == 64
    assert told(messages) == letters(slow.decode.opened[0], 0)


async def test_a_draining_router_sends_who_comes_back_elsewhere(slow):
    slow.service.requests.is_draining = True
    failure = await refusal(slow)
    assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
