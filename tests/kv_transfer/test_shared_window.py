"""All pushes to one receiver share one window of unacknowledged payload."""

from __future__ import annotations

import threading
import time

import grpc
import pytest

from outrider.errors import PeerLostError
from outrider.kv_transfer.base import CommitState
from outrider.kv_transfer.config import PROGRESS_SECONDS, KvTransferConfig
from outrider.kv_transfer.connectors import Connector
from outrider.kv_transfer.sender_stream import SenderStream
from outrider.kv_transfer.shared_window import SharedWindow
from tests.kv_transfer.conftest import RecordingSink
from tests.support.waiting import wait_for

PATIENCE_SECONDS = 60.0
NUM_PUSHES = 6
WINDOW_BYTES = 256


def test_a_receiver_that_acknowledges_nothing_costs_one_window_however_many_push_to_it(peers, receiver_factory):
    receiver, port = receiver_factory(progress_seconds=PATIENCE_SECONDS)
    address, opened = f"127.0.0.1:{port}", []
    connector = Connector(KvTransferConfig(connector="grpc", window_bytes=WINDOW_BYTES, progress_seconds=60.0))
    _, window = connector._link(address)
    for _ in range(NUM_PUSHES):
        spec, sink = peers.spec(), RecordingSink()
        sink.gate.clear()
        receiver.inbox.open(spec, sink)
        opened.append((spec, sink, connector.connect(address, spec)))

    def push(spec, sender):
        for region in peers.regions(spec):
            sender.put(region, peers.payload(region))
        results.append(sender.commit().state)
        sender.cancel()

    results: list[CommitState] = []
    threads = [threading.Thread(target=push, args=(spec, sender), daemon=True) for spec, _, sender in opened]
    for thread in threads:
        thread.start()
    wait_for(lambda: len(window._waiting) == NUM_PUSHES)
    assert 0 <= window._num_free < WINDOW_BYTES
    assert any(sender._stream._in_flight for *_, sender in opened)
    for _, sink, _ in opened:
        sink.gate.set()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    assert results == [CommitState.COMMITTED] * NUM_PUSHES
    assert all(sink.cells == peers.expected_cells(spec) for spec, sink, _ in opened)
    assert window._num_free == WINDOW_BYTES
    connector.close()


@pytest.fixture(params=["payload", "slots"])
def stream(request, peers, receiver_factory):
    """Yields an attached stream and a window of 100 that another stream has taken: the window of all payload to the
    receiver, or that of an arena's slots. The stream's progress deadline is half a second, the receiver's two seconds.
    """
    receiver, port = receiver_factory(progress_seconds=2.0)
    spec, window = peers.spec(), SharedWindow(100)
    of_payload = window if request.param == "payload" else SharedWindow(100)
    receiver.inbox.open(spec, RecordingSink())
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        config = KvTransferConfig(connect_seconds=60.0, progress_seconds=0.5)
        made = SenderStream(channel, address="there", window=of_payload, config=config)
        made.hello(spec)
        assert window.take(100, other)
        window.leave(other)
        yield made, window
        made.close()


def other():
    """Stands for another stream's `wake`."""


def test_a_stream_waits_for_its_turn_as_long_as_the_receiver_is_heard_and_says_that_it_lives(peers, stream):
    made, window = stream
    has_room = threading.Event()

    def wait():
        made.wait_for_room(80, window)
        has_room.set()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    end = time.monotonic() + 4.0
    while time.monotonic() < end:  # longer than both deadlines, in which others are acknowledged
        window.hear()
        assert not has_room.wait(0.05)
    window.give_back(100)
    assert has_room.wait(PATIENCE_SECONDS)
    thread.join(PATIENCE_SECONDS)
    assert window._num_free == 20
    assert not peers.failed


def test_a_silent_receiver_fails_those_who_wait_for_their_turn_too(stream):
    made, window = stream
    with pytest.raises(PeerLostError, match=r"acknowledged nothing for 0\.5 s"):
        made.wait_for_room(80, window)
    assert not window._waiting


def test_who_waits_for_a_slot_waits_for_one_of_this_arena_whatever_else_the_receiver_says(stream):
    """All slots of this arena may be quarantined while later transfers use another one."""
    made, _ = stream
    slots, told = SharedWindow(1), threading.Event()
    assert slots.take(1, other)
    slots.leave(other)
    threading.Timer(PATIENCE_SECONDS, slots.close).start()

    def talk():
        while not told.wait(0.05):
            made.window.hear()

    threading.Thread(target=talk, daemon=True).start()
    with pytest.raises(PeerLostError, match=r"acknowledged nothing for 0\.5 s"):
        made.wait_for_room(1, slots)
    told.set()


@pytest.mark.parametrize("progress_seconds", [0.2, 10.0, 600.0])
def test_a_patient_sender_shows_life_as_often_as_receivers_ask_for(progress_seconds):
    config = KvTransferConfig(progress_seconds=progress_seconds)
    assert config.keep_alive_seconds <= min(PROGRESS_SECONDS, progress_seconds) / 4


def test_turns_are_taken_in_the_order_of_asking_and_more_than_the_window_is_lent_alone():
    woken, window = [], SharedWindow(10)
    first, second = (lambda: woken.append("first")), (lambda: woken.append("second"))
    assert window.take(25, first)
    window.leave(first)
    assert not window.take(1, second)
    assert not window.take(1, first)
    window.give_back(25)
    assert woken == ["second"]
    assert not window.take(1, first)
    assert window.take(1, second)
    window.leave(second)
    assert woken == ["second", "first"]
    assert window.take(9, first)
