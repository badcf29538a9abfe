"""Readers of answers: streams are woken together, and tokens are merged while the event loop is overloaded."""

from __future__ import annotations

import asyncio
import time

import pytest

from outrider.answer import Delta, Finished, Started
from outrider.request import OutputOptions, Request, RequestOptions, SamplingParams
from outrider.session import SampleTokens
from router.requests.answer import OVERLOADED_SECONDS, Answer, DeliveryBatcher
from tests.router.conftest import PATIENCE_SECONDS


class Reading:
    """One reader of an answer to which a test adds tokens."""

    def __init__(self, batcher=None, render=lambda event: event):
        request = Request(
            request_id="r",
            prompt_token_ids=(1,),
            prompt_text="",
            options=RequestOptions(sampling=SamplingParams(seed=0, max_tokens=100)),
            output=OutputOptions(token_ids_only=True),
        )
        started = Started(request_id="r", num_prompt_tokens=1, seed=0, model="m", router="r")
        batcher = batcher or DeliveryBatcher()
        self.answer = Answer(request, started, tokenizer=None, batcher=batcher)
        self.answer.begin()
        self.reader = self.answer.read(render)

    def add(self, position):
        tokens = SampleTokens(sequence_group_id=b"", sample=0, start_position=position, token_ids=(position,))
        self.answer.take(tokens)

    async def next(self):
        """Returns the token ids of the next delta."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while events := await self.reader.next():
                found = [event.token_ids for event in events if isinstance(event, Delta)]
                if found:
                    return found[0]
        raise AssertionError("the answer has ended")


async def test_while_the_event_loop_is_behind_deltas_merge():
    reading = Reading()
    reading.add(1)
    time.sleep(2 * OVERLOADED_SECONDS)  # noqa: ASYNC251 this is the stall
    assert await reading.next() == (1,), "the first token never waits"
    waiting = asyncio.ensure_future(reading.next())
    await asyncio.sleep(0)
    reading.add(2)
    time.sleep(2 * OVERLOADED_SECONDS)  # noqa: ASYNC251
    await asyncio.sleep(0)
    reading.add(3)
    reading.add(4)
    assert await waiting == (2, 3, 4)


class CountingBatcher(DeliveryBatcher):
    num_turns = 0

    def _deliver(self):
        self.num_turns += 1
        super()._deliver()


async def test_one_turn_of_the_event_loop_tells_everybody():
    batcher = CountingBatcher()
    readings = [Reading(batcher) for _ in range(16)]
    for position in range(1, 4):
        waiting = [asyncio.ensure_future(reading.next()) for reading in readings]
        await asyncio.sleep(0)
        for reading in readings:
            reading.add(position)
        assert await asyncio.gather(*waiting) == [(position,)] * 16
    assert batcher.num_turns == 3


async def test_news_that_comes_while_a_stream_wakes_is_told():
    reading = Reading()
    reading.answer.started = None
    waiting = asyncio.ensure_future(reading.reader.next())
    await asyncio.sleep(0)
    reading.answer.abort()  # nothing is delivered before the answer has begun
    asyncio.get_running_loop().call_soon(reading.answer.begin)
    async with asyncio.timeout(PATIENCE_SECONDS):
        told = await waiting
    assert [type(event) for event in told] == [Started, Finished]


async def test_a_message_that_cannot_be_made_ends_its_own_stream_only():
    def refuse(event):
        if isinstance(event, Delta):
            raise KeyError("no message")
        return event

    batcher = DeliveryBatcher()
    broken, other = Reading(batcher, refuse), Reading(batcher)
    await broken.reader.next()
    await other.reader.next()
    waiting = [asyncio.ensure_future(reading.next()) for reading in (broken, other)]
    await asyncio.sleep(0)
    broken.add(1)
    other.add(1)
    with pytest.raises(KeyError, match="no message"):
        await waiting[0]
    assert await waiting[1] == (1,)


async def test_a_stream_that_ends_while_its_news_waits_leaves_the_others():
    batcher = DeliveryBatcher()
    leaving, other = Reading(batcher), Reading(batcher)
    for reading in (leaving, other):
        await reading.reader.next()
    waiting = [asyncio.ensure_future(reading.next()) for reading in (leaving, other)]
    await asyncio.sleep(0)
    leaving.add(1)
    other.add(1)
    waiting[0].cancel()
    assert await waiting[1] == (1,)
    assert waiting[0].cancelled()
