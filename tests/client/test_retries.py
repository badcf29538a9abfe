"""Retries: which failed calls are repeated, and when."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent import futures

import pytest

from outrider.client import AsyncClient, Client, RetryPolicy
from outrider.client.retry import ONE_ATTEMPT, Attempts
from outrider.errors import AbortedError, AlreadyRunningError, CapacityError, InvalidRequestError, PeerLostError
from outrider.v1 import router_pb2, router_pb2_grpc
from tests.client.answering_router import Serving, fail

WAIT_SECONDS = 60.0
QUICK = RetryPolicy(max_attempts=4, initial_backoff_seconds=0.01, max_backoff_seconds=0.02)

FULL = CapacityError("256 requests wait", retry_after_seconds=0.05)
LOST = PeerLostError("decode-0 is lost", node="decode-0", retry_after_seconds=0.0)
RUNNING = AlreadyRunningError("request 'x' is running", reason="DUPLICATE_REQUEST_ID")
INVALID = InvalidRequestError("too long", field="text")


class ScriptedRouter(router_pb2_grpc.RouterServiceServicer):
    """Each call takes the next entry of `script`: an error, or (parts of an answer, an error or None)."""

    def __init__(self) -> None:
        self.script = []
        self.requests = []
        self.seconds_left = []
        self.called = threading.Event()

    def _next(self, request, context):
        self.requests.append(request)
        self.seconds_left.append(context.time_remaining())
        self.called.set()
        entry = self.script.pop(0)
        return entry if isinstance(entry, tuple) else ((), entry)

    def Generate(self, request, context):
        parts, error = self._next(request, context)
        for index, part in enumerate(parts):
            if part == "started":
                started = router_pb2.Started(num_prompt_tokens=3, seed=len(self.requests))
                yield router_pb2.GenerateResponse(request_id=request.request_id, started=started)
            else:
                delta = router_pb2.Delta(start_position=2 + index, token_ids=[7], text=part)
                yield router_pb2.GenerateResponse(delta=delta)
        if error is not None:
            fail(context, error)
        yield router_pb2.GenerateResponse(request_id=request.request_id, summary=router_pb2.Summary())

    def Complete(self, request, context):
        _, error = self._next(request, context)
        if error is not None:
            fail(context, error)
        return router_pb2.CompleteResponse(completions=[router_pb2.Completion(text="whole")])


WHOLE = (("started", "a", "b"), None)


@pytest.fixture(scope="module")
def served():
    serving = Serving(ScriptedRouter())
    yield serving.router, serving.address
    serving.stop()


@pytest.fixture
def router(served):
    router = served[0]
    router.script, router.requests, router.seconds_left = [], [], []
    router.called.clear()
    return router


@pytest.fixture
def generate(reader_of, served, router):
    """generate(**options) reads a stream with either client and returns it. It raises what iterating raises."""
    return lambda retry=QUICK, **options: reader_of(served[1], retry=retry).generate(**options)


@pytest.fixture
def complete(reader_of, served, router):
    return lambda **options: reader_of(served[1], retry=QUICK).complete(**options)


@pytest.mark.parametrize("error", [FULL, LOST])
def test_a_refused_request_is_sent_again_under_the_same_id(generate, router, error):
    router.script = [error, error, WHOLE]
    stream = generate()
    assert stream.text() == "ab"
    assert {request.request_id for request in router.requests} == {stream.request_id}
    assert len(router.requests) == 3


def test_a_request_that_started_and_has_no_token_yet_is_sent_again(generate, router):
    router.script = [(("started",), LOST), WHOLE]
    stream = generate(request_id="mine")
    assert (stream.text(), stream.started.seed, stream.request_id) == ("ab", 2, "mine")


def test_after_the_first_token_there_is_no_second_attempt(generate, router):
    router.script = [(("started", "a"), LOST), WHOLE]
    with pytest.raises(PeerLostError, match="decode-0 is lost") as caught:
        generate()
    assert len(router.requests) == 1
    assert "1 tokens had arrived of a request without a resume window" in caught.value.__notes__[0]


def test_our_own_earlier_attempt_that_still_runs_is_waited_for(generate, complete, router):
    router.script = [LOST, RUNNING, RUNNING, WHOLE]
    assert generate().text() == "ab"
    router.script = [LOST, RUNNING, None]
    assert complete().text == "whole"


@pytest.mark.parametrize("error", [RUNNING, INVALID, AbortedError("aborted")])
def test_what_would_fail_again_is_not_sent_again(generate, router, error):
    router.script = [error, WHOLE]
    with pytest.raises(type(error)):
        generate()
    assert len(router.requests) == 1


def test_the_last_attempts_error_is_raised(generate, complete, router):
    router.script = [LOST] * 3 + [FULL]
    with pytest.raises(CapacityError, match="256 requests wait"):
        generate()
    router.script = [FULL] * 3 + [LOST]
    with pytest.raises(PeerLostError):
        complete()
    assert len(router.requests) == 8


def test_without_a_policy_nothing_is_sent_again(generate, router):
    router.script = [LOST, WHOLE]
    with pytest.raises(PeerLostError):
        generate(retry=ONE_ATTEMPT)
    assert len(router.requests) == 1


def test_all_attempts_share_one_deadline(generate, complete, router):
    busy = CapacityError("full", retry_after_seconds=0.3)
    router.script = [busy, busy, WHOLE]
    generate(timeout_seconds=5.0)
    first, second, third = router.seconds_left  # gRPC rounds a deadline by up to 3 %
    assert third < second - 0.1 < first - 0.2 < 5.0
    router.script = [CapacityError("full", retry_after_seconds=300.0), None]
    started_at = time.monotonic()
    with pytest.raises(CapacityError):  # the wait would exceed the deadline, so the error is raised at once
        complete(timeout_seconds=WAIT_SECONDS)
    assert time.monotonic() - started_at < WAIT_SECONDS / 2


def test_a_cancel_ends_the_wait_for_the_next_attempt(served, router):
    router.script = [CapacityError("full", retry_after_seconds=60.0), WHOLE]
    with Client(served[1], retry=RetryPolicy()) as client:
        stream = client.generate("hello")
        reader = futures.ThreadPoolExecutor(1).submit(list, stream)
        assert router.called.wait(WAIT_SECONDS)
        stream.cancel()
        assert reader.result(WAIT_SECONDS) == []
    assert len(router.requests) == 1


async def test_a_cancel_ends_the_wait_of_the_async_client_as_well(served, router):
    router.script = [CapacityError("full", retry_after_seconds=60.0), WHOLE]
    async with AsyncClient(served[1], retry=RetryPolicy()) as client:
        stream = client.generate("hello")

        async def read():
            return [delta async for delta in stream]

        reading = asyncio.create_task(read())
        assert await asyncio.to_thread(router.called.wait, WAIT_SECONDS)
        stream.cancel()
        assert await asyncio.wait_for(reading, WAIT_SECONDS) == []
    assert len(router.requests) == 1


def test_backoff_doubles_up_to_its_limit_and_heeds_the_router():
    policy = RetryPolicy(max_attempts=6, initial_backoff_seconds=0.2, max_backoff_seconds=1.0)
    for num_attempts, least in ((1, 0.2), (2, 0.4), (3, 0.8), (4, 1.0), (5, 1.0)):
        assert least <= policy.backoff_seconds(LOST, num_attempts=num_attempts) <= 1.25 * least
    assert policy.backoff_seconds(LOST, num_attempts=6) is None
    asked = CapacityError("full", retry_after_seconds=7.0)
    assert 7.0 <= policy.backoff_seconds(asked, num_attempts=1) <= 8.75


def test_attempts_end_at_the_deadline():
    now = [100.0]
    attempts = Attempts(RetryPolicy(max_attempts=9), timeout_seconds=2.0, clock=lambda: now[0])
    assert attempts.remaining_seconds() == 2.0
    assert attempts.next_after(LOST) is not None
    now[0] = 101.9
    assert attempts.remaining_seconds() == pytest.approx(0.1)
    assert attempts.next_after(LOST) is None
    now[0] = 103.0
    assert attempts.remaining_seconds() == 0.0
    assert Attempts(RetryPolicy(), timeout_seconds=None).remaining_seconds() is None


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
