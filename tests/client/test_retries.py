"""Retries: which failed calls are repeated, and when."""

from __future__ import annotations

import asyncio
import time
from concurrent import futures

import pytest

from outrider.client import AsyncClient, Client, RetryPolicy
from outrider.client.retry import ONE_ATTEMPT
from outrider.errors import AbortedError, AlreadyRunningError, CapacityError, InvalidRequestError, PeerLostError
from tests.client.answering_router import NUM_PROMPT_TOKENS, token_at
from tests.support.waiting import wait_for

WAIT_SECONDS = 60.0
QUICK = RetryPolicy(max_attempts=4, initial_backoff_seconds=0.01, max_backoff_seconds=0.02)

FULL = CapacityError("256 requests wait", retry_after_seconds=0.05)
LOST = PeerLostError("decode-0 is lost", node="decode-0", retry_after_seconds=0.0)
RUNNING = AlreadyRunningError("request 'x' is running", reason="DUPLICATE_REQUEST_ID")
INVALID = InvalidRequestError("too long", field="text")


@pytest.fixture
def serving(start):
    return start()


@pytest.fixture
def router(serving):
    return serving.router


@pytest.fixture
def generate(reader_of, serving):
    """generate(**options) reads a stream with either client and returns it, or raises what iterating raises."""
    return lambda retry=QUICK, **options: reader_of(serving.address, retry=retry).generate(**options)


@pytest.fixture
def complete(reader_of, serving):
    return lambda **options: reader_of(serving.address, retry=QUICK).complete(**options)


@pytest.mark.parametrize("error", [FULL, LOST])
def test_a_refused_request_is_sent_again_under_the_same_id(generate, router, error):
    router.faults = [error, error]
    stream = generate()
    assert stream.is_complete
    assert [request.request_id for _, request in router.calls] == [stream.request_id] * 3


def test_a_request_that_started_and_has_no_token_yet_is_sent_again(generate, router):
    router.faults = [1]
    stream = generate(request_id="mine", seed=None)
    assert stream.is_complete
    assert stream.request_id == "mine"
    assert stream.token_ids()[0] == token_at(stream.started.seed, 0, NUM_PROMPT_TOKENS), "the second attempt's seed"


def test_after_the_first_token_there_is_no_second_attempt(generate, router):
    router.faults = [2]
    with pytest.raises(PeerLostError, match="scripted") as caught:
        generate()
    assert len(router.calls) == 1
    assert "2 tokens had arrived of a request without a resume window" in caught.value.__notes__[0]


def test_our_own_earlier_attempt_that_still_runs_is_waited_for(generate, complete, router):
    router.faults = [LOST, RUNNING, RUNNING]
    assert generate().is_complete
    router.faults = [LOST, RUNNING]
    assert complete().text == "whole"


@pytest.mark.parametrize("error", [RUNNING, INVALID, AbortedError("aborted")])
def test_what_would_fail_again_is_not_sent_again(generate, router, error):
    router.faults = [error]
    with pytest.raises(type(error)):
        generate()
    assert len(router.calls) == 1


def test_the_last_attempts_error_is_raised(generate, complete, router):
    router.faults = [LOST] * 3 + [FULL]
    with pytest.raises(CapacityError, match="256 requests wait"):
        generate()
    router.faults = [FULL] * 3 + [LOST]
    with pytest.raises(PeerLostError):
        complete()
    assert len(router.calls) == 8


def test_without_a_policy_nothing_is_sent_again(generate, router):
    router.faults = [LOST]
    with pytest.raises(PeerLostError):
        generate(retry=ONE_ATTEMPT)
    assert len(router.calls) == 1


def test_all_attempts_share_one_deadline(generate, complete, router):
    busy = CapacityError("full", retry_after_seconds=0.3)
    router.faults = [busy, busy]
    generate(timeout_seconds=5.0)
    first, second, third = router.seconds_left  # gRPC rounds a deadline by up to 3 %
    assert third < second - 0.1 < first - 0.2 < 5.0
    router.faults = [CapacityError("full", retry_after_seconds=300.0)]
    started_at = time.monotonic()
    with pytest.raises(CapacityError):  # the wait would exceed the deadline, so the error is raised at once
        complete(timeout_seconds=WAIT_SECONDS)
    assert time.monotonic() - started_at < WAIT_SECONDS / 2


async def test_loading_an_adapter_has_a_timeout_of_its_own(serving, router):
    """A node's load may take a minute."""
    with Client(serving.address, timeout_seconds=1.0) as client:
        client.load_adapter("sql", "d")
        client.load_adapter("sql", "d", timeout_seconds=50.0)
    async with AsyncClient(serving.address, timeout_seconds=1.0) as client:
        await client.load_adapter("sql", "d")
        assert (await client.load_adapter("sql", "d", timeout_seconds=50.0)).name == "sql"
    assert router.seconds_left == pytest.approx([90.0, 50.0, 90.0, 50.0], abs=5.0)


def test_a_cancel_ends_the_wait_for_the_next_attempt(serving, router):
    router.faults = [CapacityError("full", retry_after_seconds=60.0)]
    with Client(serving.address, retry=RetryPolicy()) as client:
        stream = client.generate("hello")
        reader = futures.ThreadPoolExecutor(1).submit(list, stream)
        wait_for(lambda: router.calls)
        stream.cancel()
        assert reader.result(WAIT_SECONDS) == []
    assert len(router.calls) == 1


async def test_a_cancel_ends_the_wait_of_the_async_client_as_well(serving, router):
    router.faults = [CapacityError("full", retry_after_seconds=60.0)]
    async with AsyncClient(serving.address, retry=RetryPolicy()) as client:
        stream = client.generate("hello")

        async def read():
            return [delta async for delta in stream]

        reading = asyncio.create_task(read())
        await asyncio.to_thread(wait_for, lambda: router.calls)
        stream.cancel()
        assert await asyncio.wait_for(reading, WAIT_SECONDS) == []
    assert len(router.calls) == 1


def test_backoff_doubles_up_to_its_limit_and_heeds_the_router():
    policy = RetryPolicy(max_attempts=6, initial_backoff_seconds=0.2, max_backoff_seconds=1.0)
    for num_attempts, least in ((1, 0.2), (2, 0.4), (3, 0.8), (4, 1.0), (5, 1.0)):
        assert least <= policy.backoff_seconds(LOST, num_attempts=num_attempts) <= 1.25 * least
    assert policy.backoff_seconds(LOST, num_attempts=6) is None
    asked = CapacityError("full", retry_after_seconds=7.0)
    assert 7.0 <= policy.backoff_seconds(asked, num_attempts=1) <= 8.75


@pytest.mark.parametrize("seconds", [0, -1.5, float("nan")])
def test_a_timeout_that_is_not_above_0_is_named_before_anybody_is_asked(seconds):
    with Client("127.0.0.1:1") as client:
        for call in (client.complete, client.generate):
            with pytest.raises(ValueError, match=f"timeout_seconds must be above 0, not {seconds}"):
                call("hi", timeout_seconds=seconds)
    with pytest.raises(ValueError, match=f"timeout_seconds must be above 0, not {seconds}"):
        Client("127.0.0.1:1", timeout_seconds=seconds)


@pytest.mark.parametrize(
    "fields", [{"max_attempts": 0}, {"initial_backoff_seconds": -1.0}, {"initial_backoff_seconds": 9.0}]
)
def test_an_impossible_policy_is_refused(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        RetryPolicy(**fields)
