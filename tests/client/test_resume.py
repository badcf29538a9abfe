"""A stream that loses its router is resumed on the same or another router, sent to another one again, or given up."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from outrider.client import AsyncClient, Client, RetryPolicy
from outrider.errors import (
    AbortedError,
    AlreadyRunningError,
    CapacityError,
    InternalError,
    MismatchError,
    NotFoundError,
    PeerLostError,
)
from tests.client.answering_router import NUM_PROMPT_TOKENS, NUM_TOKENS, Serving, answer, delta
from tests.client.readers import SEED

WAIT_SECONDS = 60.0
HELD_AT = 14
"""Number of messages after which a router waits, so that an answer cannot end before the test disturbs it."""
NOBODY = "127.0.0.1:1"
DEFAULT_WINDOW_SECONDS = 30.0
PROJECT = Path(__file__).parents[2]


def at(number, action):
    """Returns an `on_delta` that calls `action` at the Delta with this number."""
    return lambda index: action() and False if index == number else None


def assert_whole(reader, stream, *, n=1, seed=SEED):
    """Checks that every token and all text arrived once and in order."""
    expected = [message.delta for message in answer(seed, n=n) if message.HasField("delta")]
    for sample in range(n):
        of_sample = [entry for entry in expected if entry.sample == sample]
        token_ids = tuple(token for entry in of_sample for token in entry.token_ids)
        assert stream.token_ids(sample) == token_ids
        assert stream.text(sample) == "".join(entry.text for entry in of_sample)
        position = NUM_PROMPT_TOKENS
        for new in (new for new in reader.deltas if new.sample == sample):
            assert new.start_position == position
            position += len(new.token_ids)
    assert stream.is_complete
    assert stream.finished.keys() == set(range(n))
    assert stream.started.seed == seed
    assert stream.summary.usage.num_generated_tokens == n * NUM_TOKENS


@pytest.mark.parametrize("n", [1, 3])
def test_a_broken_stream_is_resumed_on_the_same_router(reader_of, start, n):
    first, second = start(), start()
    whole = list(answer(SEED, n=n))
    # The stream breaks before and after Started, in the middle, after a sample's last text, and before the summary.
    first.router.faults = [0, 1, 7, len(whole) // 2, 1]
    reader = reader_of([first.address, second.address])
    stream = reader.generate(n=n)
    assert_whole(reader, stream, n=n)
    assert first.router.methods()[0] == "Generate"
    assert set(first.router.methods()[1:]) == {"Resume"}
    assert second.router.calls == []
    assert not first.router.aborted


def test_every_place_where_a_stream_can_break(reader_of, start):
    whole = list(answer(SEED))
    serving = start()
    for num_messages in range(len(whole) + 2):
        serving.router.faults = [num_messages, None]
        reader = reader_of(serving.address)
        assert_whole(reader, reader.generate(resume_window_seconds=10.0, request_id=f"r{num_messages}"))


def test_a_router_that_is_gone_is_replaced_by_another_of_its_store(reader_of, start):
    first, second = start(held_at=HELD_AT), start()
    reader = reader_of(f"{first.address}, {second.address}")
    stream = reader.generate(n=2, on_delta=at(9, first.stop))
    assert_whole(reader, stream, n=2)
    assert second.router.methods() == ["Resume"]
    first_resumed = second.router.calls[0][1]
    assert first_resumed.next_positions.keys() == {0, 1}


@pytest.mark.parametrize("options", [{}, {"seed": None}, {"prompt_logprobs": 0}])
def test_without_a_common_store_the_request_is_sent_again_with_what_has_come(reader_of, start, options):
    first, second = start("one", held_at=HELD_AT), start("other")
    reader = reader_of([first.address, second.address])
    stream = reader.generate(**options, on_delta=at(4, first.stop))
    assert_whole(reader, stream, seed=stream.started.seed)
    assert second.router.methods() == ["Resume", "Generate"]
    again = second.router.calls[1][1]
    assert len(again.generated_token_ids) >= 10
    assert (again.request_id, again.sampling.seed) == (stream.request_id, stream.started.seed)
    assert not again.output.HasField("prompt_logprobs"), "they have arrived"
    logprobs = [entry.logprob for entry in stream.started.prompt_logprobs[1:]]
    assert logprobs == ([-0.5, -1.0] if "prompt_logprobs" in options else [])


@pytest.mark.parametrize("second_adapter", ["a1", "b2", ""])
def test_an_answer_that_is_sent_again_goes_on_with_its_adapter_or_not_at_all(reader_of, start, second_adapter):
    first, second = start("one", held_at=HELD_AT), start("other")
    first.router.adapter_fingerprint, second.router.adapter_fingerprint = "a1", second_adapter
    reader = reader_of([first.address, second.address])
    if second_adapter == "a1":
        assert_whole(reader, stream := reader.generate(model="sql", on_delta=at(4, first.stop)))
        assert stream.started.adapter_fingerprint == "a1"
    else:
        with pytest.raises(MismatchError, match="another adapter"):
            reader.generate(model="sql", on_delta=at(4, first.stop))
    assert first.router.calls[0][1].adapter_fingerprint == ""
    assert second.router.calls[1][1].adapter_fingerprint == "a1"


def test_a_request_that_had_only_started_is_sent_again_with_the_adapter_of_its_prompt_logprobs(reader_of, start):
    first, second = start("one"), start("other")
    first.router.adapter_fingerprint = "a1"
    first.router.faults = [1, PeerLostError("gone")]
    second.router.adapter_fingerprint = "b2"
    with pytest.raises(MismatchError, match="another adapter"):
        reader_of([first.address, second.address]).generate(model="sql", prompt_logprobs=0)


def test_an_answer_that_is_resumed_by_another_adapter_is_an_error(reader_of, start):
    first, second = start(held_at=HELD_AT), start()
    first.router.adapter_fingerprint, second.router.adapter_fingerprint = "a1", "b2"
    with pytest.raises(MismatchError, match=r"began with a1, but .* continues it with b2") as raised:
        reader_of([first.address, second.address]).generate(model="sql", on_delta=at(4, first.stop))
    assert raised.value.reason == "ADAPTER_MISMATCH"


@pytest.mark.parametrize("pinned", [{}, {"adapter_fingerprint": "a1"}])
def test_a_request_that_is_repeated_before_its_first_token_has_the_fingerprint_that_its_caller_gave(
    reader_of, start, pinned
):
    serving = start()
    serving.router.adapter_fingerprint = "a1"
    serving.router.faults = [1]
    reader = reader_of(serving.address, retry=RetryPolicy(max_attempts=2, initial_backoff_seconds=0.01))
    assert_whole(reader, stream := reader.generate(model="sql", **pinned))
    sent = [request.adapter_fingerprint for _, request in serving.router.calls]
    assert sent == 2 * [pinned.get("adapter_fingerprint", "")]
    assert stream.started.adapter_fingerprint == "a1"


def test_several_samples_that_had_begun_cannot_be_sent_again(reader_of, start):
    first, second = start("one", held_at=HELD_AT), start("other")
    with pytest.raises(NotFoundError) as raised:
        reader_of([first.address, second.address]).generate(n=2, on_delta=at(4, first.stop))
    assert "only a request with n = 1" in raised.value.__notes__[0]


def test_a_router_that_cannot_be_reached_at_first_is_passed_over(reader_of, start):
    serving = start()
    reader = reader_of([NOBODY, serving.address])
    assert_whole(reader, reader.generate())
    assert serving.router.methods() == ["Resume", "Generate"]
    reader = reader_of([NOBODY, serving.address])
    assert_whole(reader, reader.generate(resume_window_seconds=None))
    assert not serving.router.calls[-1][1].HasField("resume_window")


@pytest.mark.parametrize("first_fault", [PeerLostError("?"), 6])
def test_an_earlier_call_that_arrived_after_all_is_resumed(reader_of, start, first_fault):
    serving = start()
    if first_fault != 6:
        serving.router.store("mine", seed=SEED)
    serving.router.faults = [first_fault, NotFoundError("not yet"), AlreadyRunningError("now"), None]
    reader = reader_of(serving.address)
    assert_whole(reader, reader.generate(request_id="mine", resume_window_seconds=10.0))
    assert serving.router.methods() == ["Generate", "Resume", "Generate", "Resume"]


def test_an_id_that_is_in_use_is_an_error_and_is_not_aborted(reader_of, start):
    serving = start()
    serving.router.store("theirs")
    with pytest.raises(AlreadyRunningError):
        reader_of([serving.address, NOBODY]).generate(request_id="theirs")
    assert serving.router.methods() == ["Generate"]
    assert not serving.router.aborted


def test_no_room_while_resuming_is_waited_for(reader_of, start):
    serving = start()
    full = CapacityError("full", retry_after_seconds=0.1)
    taking_over = AlreadyRunningError("another call is taking it over")
    serving.router.faults = [
        4,
        full,
        full,
        PeerLostError("no node", retry_after_seconds=0.1, reason="NO_NODE"),
        taking_over,
        None,
    ]
    reader = reader_of(serving.address)
    assert_whole(reader, reader.generate(resume_window_seconds=10.0))


@pytest.mark.parametrize("has_second", [False, True])
def test_who_resumes_waits_as_long_as_this_router_asked_and_asks_another_one_at_once(reader_of, start, has_second):
    first = start()
    targets = [first.address, start().address] if has_second else [first.address]
    first.router.faults = [4, CapacityError("full", retry_after_seconds=0.6), CapacityError("full"), None]
    began_at = time.monotonic()
    assert_whole(reader := reader_of(targets), reader.generate(resume_window_seconds=10.0))
    methods = ["Generate", "Resume"] if has_second else ["Generate", "Resume", "Resume", "Resume"]
    assert first.router.methods() == methods
    assert (time.monotonic() - began_at >= 1.6) != has_second


def test_a_full_system_refuses_as_ever(reader_of, start):
    first, second = start(), start()
    first.router.faults = [CapacityError("full", retry_after_seconds=0.01)] * 2
    with pytest.raises(CapacityError):
        reader_of([first.address, second.address]).generate()
    assert second.router.calls == []
    reader = reader_of([first.address, second.address], retry=RetryPolicy(initial_backoff_seconds=0.01))
    assert_whole(reader, reader.generate())
    assert first.router.methods() == ["Generate"] * 3


def test_a_stream_whose_answer_another_one_took_over_ends(reader_of, start):
    serving = start(held_at=HELD_AT)
    other = Client(serving.address)
    taken = []

    def take_over(index):
        if index == 3:
            taken.append(threading.Thread(target=lambda: taken.append(list(other.resume("mine")))))
            taken[0].start()

    with pytest.raises(AbortedError, match="another stream has the answer"):
        reader_of([serving.address, NOBODY]).generate(request_id="mine", on_delta=take_over)
    taken[0].join(WAIT_SECONDS)
    assert sum(len(new.token_ids) for new in taken[1]) == NUM_TOKENS  # the answer was not aborted
    other.close()


def test_the_resume_window_limits_how_long_it_is_tried(reader_of, start):
    serving = start(held_at=HELD_AT)
    lost_at = []

    def stop(index):
        if index == 3:
            serving.stop()
            lost_at.append(time.monotonic())

    with pytest.raises(PeerLostError):
        reader_of([serving.address, NOBODY]).generate(resume_window_seconds=1.0, on_delta=stop)
    assert 0.9 < time.monotonic() - lost_at[0] < DEFAULT_WINDOW_SECONDS / 2


def test_the_deadline_limits_it_as_well(reader_of, start):
    serving = start(held_at=HELD_AT)
    began_at = time.monotonic()
    with pytest.raises((PeerLostError, AbortedError)):
        reader_of([serving.address, NOBODY]).generate(
            timeout_seconds=1.5,
            on_delta=at(3, serving.stop),
        )
    assert time.monotonic() - began_at < DEFAULT_WINDOW_SECONDS / 2


def test_nobody_at_all_is_told_at_once(reader_of):
    began_at = time.monotonic()
    with pytest.raises(PeerLostError):
        reader_of([NOBODY, "127.0.0.1:2"]).generate()
    assert time.monotonic() - began_at < DEFAULT_WINDOW_SECONDS / 2


def test_an_answer_that_is_left_early_is_aborted_in_spite_of_its_window(reader_of, start):
    serving = start(held_at=HELD_AT)
    stream = reader_of(serving.address).generate(resume_window_seconds=30.0, on_delta=lambda index: index == 3)
    assert serving.router.aborted == [stream.request_id]
    stream = reader_of(serving.address).generate(on_delta=lambda index: index == 3)
    assert serving.router.aborted == [serving.router.aborted[0]]  # without a window, cancelling the call is enough


def test_closing_the_client_aborts_what_it_streams(start):
    serving = start(held_at=HELD_AT)
    client = Client(serving.address)
    stream = client.generate("hello", resume_window_seconds=30.0)
    assert next(iter(stream)).token_ids
    client.close()
    assert serving.router.aborted == [stream.request_id]


async def test_closing_the_async_client_aborts_what_it_streams(start):
    serving = start(held_at=HELD_AT)
    client = AsyncClient(serving.address)
    stream = client.generate("hello", resume_window_seconds=30.0)
    async for _ in stream:
        await client.close()
        break
    assert serving.router.aborted == [stream.request_id]


def test_a_resume_window_is_the_default_with_several_routers_only(reader_of, start):
    serving = start()

    def window(targets, **options):
        reader_of(targets).generate(**options)
        sent = [request for method, request in serving.router.calls if method == "Generate"][-1]
        return sent.resume_window.seconds if sent.HasField("resume_window") else None

    assert window(serving.address) is None
    assert window([serving.address, NOBODY]) == 30
    assert window([serving.address, NOBODY], resume_window_seconds=7.0) == 7
    assert window([serving.address, NOBODY], resume_window_seconds=None) is None
    assert window(serving.address, resume_window_seconds=9.0) == 9


def test_an_answer_is_resumed_by_its_id_from_any_position(reader_of, start):
    second = start()
    second.router.store("mine", n=2)
    reader = reader_of([NOBODY, second.address])
    stream = reader.read(lambda client: client.resume("mine", {1: NUM_PROMPT_TOKENS + NUM_TOKENS - 1}))
    assert len(stream.token_ids(0)) == NUM_TOKENS
    assert len(stream.token_ids(1)) == 1
    assert stream.is_complete
    with pytest.raises(NotFoundError):
        reader_of(second.address).read(lambda client: client.resume("nobody's"))


@pytest.mark.parametrize("reason", ["TOO_MANY_CALLS", "RATE_LIMIT"])
def test_who_resumes_by_an_id_and_is_refused_at_first_asks_again_as_late_as_the_router_wants(reader_of, start, reason):
    serving = start()
    serving.router.store("mine", seed=SEED)
    serving.router.faults = [CapacityError("full", retry_after_seconds=0.3, reason=reason)] * 2
    reader = reader_of(serving.address, retry=RetryPolicy(initial_backoff_seconds=0.01))
    began_at = time.monotonic()
    stream = reader.read(lambda client: client.resume("mine"))
    assert stream.is_complete
    assert len(stream.token_ids(0)) == NUM_TOKENS
    assert time.monotonic() - began_at >= 0.6
    serving.router.faults = [CapacityError("full", reason=reason)]
    with pytest.raises(CapacityError):
        reader_of(serving.address, retry=RetryPolicy(max_attempts=1)).read(lambda client: client.resume("mine"))


def test_a_delta_that_leaves_a_gap_or_comes_twice_is_never_handed_on(reader_of, start):
    for messages in (
        [delta(0, 3, [1, 2], "a"), delta(0, 6, [3], "b")],
        [delta(0, 3, [1, 2], "a"), delta(0, 4, [2], "b")],
    ):
        serving = start()
        serving.router.Generate = lambda request, context, messages=messages: iter(messages)
        stopped = Serving(serving.router)
        with pytest.raises(InternalError, match="instead of 5"):
            reader_of(stopped.address).generate()
        stopped.stop()


def test_a_router_that_resumes_another_request_is_found_out(reader_of, start):
    first, second = start("one"), start("other")
    first.router.faults = [4, PeerLostError("gone")]
    second.router.store("mine", seed=SEED + 1)
    with pytest.raises(InternalError, match="another request"):
        reader_of([first.address, second.address]).generate(request_id="mine")


def test_a_router_process_that_is_frozen_goes_unnoticed(reader_of, start, tmp_path):
    """tests/faults/test_lost_routers.py tests a killed router."""
    second = start()
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.client.answering_router", str(tmp_path / "store"), "0", str(HELD_AT)],
        stdout=subprocess.PIPE, cwd=PROJECT, text=True,
    )  # fmt: skip
    try:
        reader = reader_of([process.stdout.readline().strip(), second.address])
        assert_whole(reader, reader.generate(on_delta=at(5, lambda: process.send_signal(signal.SIGSTOP))))
        assert second.router.methods() == ["Resume"]
    finally:
        process.kill()
        process.wait(WAIT_SECONDS)
        process.stdout.close()
