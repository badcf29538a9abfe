"""Streams that are attached to no transfer: bounded, and displaced by others."""

from __future__ import annotations

import contextlib
import queue
import threading

import grpc
import pytest

from outrider.kv_transfer.base import CommitState
from outrider.kv_transfer.frames import (
    ALIVE,
    METHOD,
)
from outrider.kv_transfer.inbox import AttachState
from tests.support.kv_messages import decode_receiver_message, encode_hello
from tests.support.waiting import wait_for


class ManyStreams:
    """Raw streams over one connection."""

    def __init__(self, port):
        self.channel = grpc.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)])
        self._queues = []

    def open(self, *messages):
        outgoing = queue.SimpleQueue()
        for message in messages:
            outgoing.put(message)
        self._queues.append(outgoing)
        return self.channel.stream_stream(METHOD)(iter(outgoing.get, None), timeout=60)

    def close(self):
        for outgoing in self._queues:
            outgoing.put(None)
        self.channel.close()


@pytest.fixture
def many():
    opened = []

    def open_many(port):
        opened.append(ManyStreams(port))
        return opened[-1]

    yield open_many
    for streams in opened:
        streams.close()


def read_all(call):
    with contextlib.suppress(grpc.RpcError):
        for _ in call:
            pass


UNKNOWN_HELLO = encode_hello(b"?" * 16, b"?" * 16)


@pytest.mark.parametrize("messages", [(), (ALIVE,), (UNKNOWN_HELLO,)], ids=["no", "alive", "lie"])
def test_streams_that_never_attach_keep_no_honest_sender_out(peers, receiver_factory, raw, many, monkeypatch, messages):
    monkeypatch.setattr("outrider.kv_transfer.receiver.HELLO_SECONDS", 600.0)  # no deadline helps
    receiver, port = receiver_factory(max_senders=8, max_unattached=4, progress_seconds=600.0)
    hostile = many(port)
    readers = []
    for _ in range(20):
        readers.append(threading.Thread(target=read_all, args=(hostile.open(*messages),)))
        readers[-1].start()
        wait_for(lambda: sum(reader.is_alive() for reader in readers) <= 4)  # the others are displaced, or sent away
    wait_for(lambda: len(receiver._streams) <= 4)  # on their side, too: what a peer has heard may not be done yet
    spec = peers.spec()
    receiver.inbox.open(spec, peers.sink())
    stream = raw(port)
    assert stream.ask(peers.hello(spec)).state is AttachState.ATTACHED
    assert peers.finish(spec, stream) is CommitState.COMMITTED


def test_a_stream_that_guesses_transfers_is_sent_away_after_a_few(receiver_factory, raw):
    _, port = receiver_factory()
    stream = raw(port)
    for _ in range(100):
        stream.say(UNKNOWN_HELLO)
    answers = []
    with pytest.raises(grpc.RpcError) as ended:
        answers += stream.call
    assert ended.value.code() is grpc.StatusCode.CANCELLED
    assert len(answers) < 100


class Context:
    """Of a call that gRPC does not carry: nothing is sent before the test asks for it."""

    is_cancelled = False

    def auth_context(self):
        return {}

    def add_callback(self, _callback):
        return True

    def cancel(self):
        self.is_cancelled = True


def test_an_attached_stream_whose_welcome_is_not_sent_yet_is_attached(peers):
    receiver = peers.new_receiver(max_unattached=1)
    spec = peers.spec()
    receiver.inbox.open(spec, peers.sink())
    context = Context()
    replies = receiver._push(iter((peers.hello(spec),)), context)
    assert decode_receiver_message(next(replies)).state is AttachState.ATTACHED
    for _ in range(3):
        assert list(receiver._push(iter(()), Context())) == []
    assert not context.is_cancelled
    replies.close()


def test_a_stream_that_says_nothing_is_sent_away(receiver_factory, raw, monkeypatch):
    monkeypatch.setattr("outrider.kv_transfer.receiver.HELLO_SECONDS", 0.2)
    _, port = receiver_factory()
    with pytest.raises(grpc.RpcError) as ended:
        next(raw(port).call)
    assert ended.value.code() is grpc.StatusCode.CANCELLED


def test_eight_prefill_nodes_with_seventeen_prompts_each_are_let_in(peers, receiver_factory, many):
    receiver, port = receiver_factory()
    states = []
    for _ in range(8):
        streams = many(port)
        for _ in range(17):
            spec = peers.spec()
            receiver.inbox.open(spec, peers.sink())
            welcome = next(streams.open(peers.hello(spec)))
            states.append(decode_receiver_message(welcome).state)
    assert states == [AttachState.ATTACHED] * (8 * 17)
