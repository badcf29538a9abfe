"""The memory budget of answers: they are charged as they grow, and evicted if their clients do not read."""

from __future__ import annotations

import asyncio
import gc
import time
from contextlib import suppress

import pytest
from google.protobuf import duration_pb2

from outrider.errors import CapacityError, InvalidRequestError
from outrider.request import Request, RequestOptions, SamplingParams
from outrider.v1 import router_pb2
from router.api.clients import Caller
from router.requests import answer_budget
from router.requests.answer_budget import LEFT_SECONDS, STALLED_SECONDS, TICK_SECONDS, AnswerBudget, LoopClock, Unread
from tests.router.conftest import PATIENCE_SECONDS
from tests.support.memory import traced
from tests.support.router_fakes import fake_model_info

TOKEN = 96
"""Bytes that the budget charges for one token."""


def request(num_prompt_tokens=1, max_tokens=1, num_brought=0):
    """Returns the request of an answer in a budget. By default, the answer is not expected to grow."""
    return Request(
        request_id="r",
        prompt_token_ids=(1,) * num_prompt_tokens,
        prompt_text="",
        generated_token_ids=(1,) * num_brought,
        options=RequestOptions(sampling=SamplingParams(seed=0, max_tokens=max_tokens)),
    )


class Holder:
    def __init__(self, budget, stalled_since=None, *, delivered_at=None, left_at=None, num_made=0, **fields):
        self.error = None
        self.budget = budget
        self.account = budget.open(request(**fields), num_known_tokens=num_made)
        self.account.give_up = self.give_up
        states = zip(Unread, (delivered_at, stalled_since, left_at), strict=True)
        self.account.unread = next(((why, since) for why, since in states if since is not None), None)

    def grow(self, num_tokens):
        self.budget.grow(self.account, num_tokens)

    def settle(self, num_tokens):
        self.budget.settle(self.account, num_tokens)

    def close(self):
        self.budget.close(self.account)

    def give_up(self, error):
        self.error = error
        self.close()


@pytest.fixture
def clock():
    return [100.0]


@pytest.fixture
def budget(clock, monkeypatch):
    monkeypatch.setattr(answer_budget, "BYTES_PER_ANSWER", 0)
    monkeypatch.setattr(answer_budget, "BYTES_PER_SAMPLE", 0)
    return AnswerBudget(100 * TOKEN, clock=lambda: clock[0])


def test_an_answer_takes_what_it_has_and_not_what_it_might_grow_to(budget):
    holders = [Holder(budget) for _ in range(22)]
    assert budget.reserved_bytes == 22 * 2 * TOKEN
    holders[0].grow(56)
    with pytest.raises(CapacityError) as full:
        holders[-1].grow(1)
    assert (full.value.reason, full.value.retry_after_seconds) == ("JOURNAL_FULL", 1.0)
    with pytest.raises(CapacityError):
        Holder(budget)
    for holder in holders:
        holder.close()
        holder.grow(1)
        holder.close()
    assert budget.reserved_bytes == 0


def test_answers_that_run_have_room_to_their_ends(budget):
    holders = [Holder(budget, max_tokens=20) for _ in range(4)]
    with pytest.raises(CapacityError):
        Holder(budget, max_tokens=20)
    for holder in holders:
        holder.grow(19)
    holders[0].settle(20)
    Holder(budget, max_tokens=15)
    assert not any(holder.error for holder in holders)
    assert budget.reserved_bytes == (4 * 21 + 2) * TOKEN


def test_tokens_that_the_client_brought_or_another_router_made_are_counted_and_not_expected(budget):
    for tokens in ({"num_brought": 30}, {"num_made": 30}):
        Holder(budget, max_tokens=40, **tokens)
    assert budget.reserved_bytes == 2 * 32 * TOKEN
    Holder(budget, max_tokens=17)
    with pytest.raises(CapacityError):
        Holder(budget)


def test_what_is_expected_follows_what_answers_had(clock, monkeypatch):
    monkeypatch.setattr(answer_budget, "BYTES_PER_ANSWER", 0)
    monkeypatch.setattr(answer_budget, "BYTES_PER_SAMPLE", 0)
    budget = AnswerBudget(100_000 * TOKEN)

    def num_admitted():
        holders = []
        with suppress(CapacityError):
            while True:
                holders.append(Holder(budget, max_tokens=100_000))
        for holder in holders:
            holder.close()
        return len(holders)

    at_first = num_admitted()
    for _ in range(500):
        Holder(budget).settle(60)
    assert num_admitted() > 2 * at_first > 100
    for _ in range(20):
        Holder(budget).settle(5000)
    assert num_admitted() < 25


def test_where_more_comes_than_was_expected_the_newest_answers_end(budget, clock):
    stalled = Holder(budget, clock[0] - 2 * STALLED_SECONDS, num_prompt_tokens=9)
    oldest, *others = (Holder(budget, num_prompt_tokens=19) for _ in range(4))
    oldest.grow(15)
    assert (stalled.error.reason, [other.error for other in others]) == ("NOT_READING", [None] * 3)
    oldest.grow(30)
    assert [other.error and other.error.reason for other in others] == [None, "JOURNAL_FULL", "JOURNAL_FULL"]
    with pytest.raises(CapacityError) as full:
        others[0].grow(36)
    assert (full.value.reason, oldest.error) == ("JOURNAL_FULL", None)


async def test_nobody_is_late_while_the_event_loop_itself_is_held_up():
    clock = LoopClock()
    try:
        before, loop = clock(), asyncio.get_running_loop()
        time.sleep(0.5)  # noqa: ASYNC251 that is what it is about
        until = loop.time()
        assert clock() - before <= 2 * TICK_SECONDS
        async with asyncio.timeout(PATIENCE_SECONDS):
            while clock() - before < 5 * TICK_SECONDS:
                await asyncio.sleep(0.01)
        assert loop.time() - until >= 2 * TICK_SECONDS, "it goes on like any other"
    finally:
        clock.close()


def test_what_can_never_fit_is_not_told_to_come_again(budget):
    with pytest.raises(InvalidRequestError):
        Holder(budget, num_prompt_tokens=100)
    holder = Holder(budget, num_prompt_tokens=90)
    with pytest.raises(InvalidRequestError) as alone:
        holder.grow(10)
    assert alone.value.reason == "ANSWER_TOO_LARGE"
    assert budget.reserved_bytes == 91 * TOKEN


def test_who_does_not_read_gives_way_the_longest_first(budget, clock):
    now = clock[0]
    longest, stalled, lately, reading = (
        Holder(budget, since, num_prompt_tokens=24)
        for since in (now - 3 * STALLED_SECONDS, now - STALLED_SECONDS, now - STALLED_SECONDS / 2, None)
    )
    reading.grow(10)
    assert isinstance(longest.error, CapacityError)
    assert stalled.error is None
    reading.grow(25)
    assert stalled.error.reason == "NOT_READING"
    with pytest.raises(CapacityError):
        reading.grow(30)
    assert lately.error is None


def test_delivered_answers_give_way_first_and_abandoned_ones_last(budget, clock):
    now = clock[0]
    left = Holder(budget, left_at=now - LEFT_SECONDS, num_prompt_tokens=19)
    left.settle(None)
    stalled = Holder(budget, now - 2 * STALLED_SECONDS, num_prompt_tokens=19)
    delivered = [Holder(budget, delivered_at=now - age, num_prompt_tokens=19) for age in (1, 5)]
    running = Holder(budget, left_at=now - LEFT_SECONDS, num_prompt_tokens=19)
    order = [delivered[1], delivered[0], stalled, left]
    for num_dropped in range(1, 5):
        Holder(budget, num_prompt_tokens=17)
        assert [holder.error is not None for holder in order] == [nth < num_dropped for nth in range(4)]
    with pytest.raises(CapacityError):
        Holder(budget, num_prompt_tokens=17)
    assert running.error is None


def test_the_objects_around_an_answer_count():
    budget = AnswerBudget(1 << 20)
    Holder(budget)
    assert budget.reserved_bytes == answer_budget.BYTES_PER_ANSWER + answer_budget.BYTES_PER_SAMPLE + 2 * TOKEN


def test_nobody_gives_way_to_an_answer_that_does_not_fit_all_the_same(budget, clock):
    stalled = Holder(budget, clock[0] - 2 * STALLED_SECONDS, num_prompt_tokens=24)
    Holder(budget, num_prompt_tokens=69)
    with pytest.raises(CapacityError) as refused:
        Holder(budget, num_prompt_tokens=49)
    assert refused.value.reason == "JOURNAL_FULL"
    assert stalled.error is None
    Holder(budget, num_prompt_tokens=24)
    assert stalled.error.reason == "NOT_READING"


@pytest.fixture
async def wide(cluster):
    """A cluster with a context window of 131,072 tokens."""
    model = fake_model_info(max_model_len=131_072)
    for node in cluster.nodes:
        node.model = model
    cluster.decode.num_blocks = 1 << 20
    return cluster


async def test_long_windows_reserve_nothing_for_tokens_that_may_never_come(wide):
    wide.decode.step_seconds = 0.005
    await wide.serve(answer_memory_bytes=8 << 20)
    calls = [wide.stub.Generate(wide.request(sampling=router_pb2.SamplingParams(seed=1))) for _ in range(30)]
    for call in calls:
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert (await call.read()).HasField("started")
    for call in calls:
        call.cancel()
    await wide.is_empty()


async def test_a_client_that_never_reads_locks_nobody_out(cluster, monkeypatch):
    """gRPC buffers megabytes for a client that does not read, so the test uses a writer that takes nothing."""
    monkeypatch.setattr(answer_budget, "STALLED_SECONDS", 0.05)
    monkeypatch.setattr(answer_budget, "TICK_SECONDS", 0.01)
    await cluster.serve(answer_memory_bytes=65_536)
    unread = await cluster.service.requests.begin(cluster.request(max_tokens=400), Caller())

    async def never_taken(_event):
        await asyncio.Event().wait()

    writing = asyncio.create_task(unread.write(never_taken, lambda event: event))
    await cluster.eventually(lambda: unread.answer.has_ended)
    assert cluster.context.answers.reserved_bytes > 400 * TOKEN
    assert len((await cluster.generate(max_tokens=400)).token_ids()) == 400
    async with asyncio.timeout(PATIENCE_SECONDS):
        with pytest.raises(CapacityError) as told:
            await writing
    assert told.value.reason == "NOT_READING"
    await cluster.is_empty()


async def test_an_answer_that_is_kept_takes_no_more_memory_than_it_is_charged(cluster):
    """Compares the median of five rounds, because a table of the interpreter may grow in one of them.

    For example, its set of all tasks grows by 128 KiB at once if earlier tests have left a thousand tasks.
    """
    await cluster.serve()

    async def keep(num_answers):
        for _ in range(num_answers):
            await cluster.generate(resume_window=duration_pb2.Duration(seconds=300), max_tokens=1)
        cluster.decode.opened.clear()
        cluster.prefill.requests.clear()
        gc.collect()

    await keep(5)  # makes the allocations that are made once per process
    excesses = []
    with traced() as size:
        for _ in range(5):
            charged, before = cluster.context.answers.reserved_bytes, size()
            await keep(10)
            excesses.append(size() - before - (cluster.context.answers.reserved_bytes - charged))
    assert sorted(excesses)[len(excesses) // 2] <= 0, excesses
