"""Streams without a transfer: their number is limited, and newer ones displace older ones."""

from __future__ import annotations

import contextlib
import threading

import grpc
import pytest

from outrider.kv_transfer.base import CommitState
from outrider.kv_transfer.frames import (
    ALIVE,
)
from outrider.kv_transfer.inbox import AttachState
from tests.support.kv_messages import decode_receiver_message, encode_hello
from tests.support.waiting import wait_for


def read_all(call):
    with contextlib.suppress(grpc.RpcError):
        for _ in call:
            pass


UNKNOWN_HELLO = encode_hello(b"?" * 16, b"?" * 16)


@pytest.mark.parametrize("messages", [(), (ALIVE,), (UNKNOWN_HELLO,)], ids=["no", "alive", "lie"])
def test_streams_that_never_attach_keep_no_honest_sender_out(peers, receiver_factory, raw, monkeypatch, messages):
    monkeypatch.setattr("outrider.kv_transfer.receiver.HELLO_SECONDS", 600.0)  # no deadline helps
    receiver, port = receiver_factory(max_senders=8, max_unattached=4, progress_seconds=600.0)
    channel, readers = None, []
    for _ in range(20):
        hostile = raw(port, *messages, channel=channel)
        channel = hostile.channel
        readers.append(threading.Thread(target=read_all, args=(hostile.call,)))
        readers[-1].start()
        wait_for(lambda: sum(reader.is_alive() for reader in readers) <= 4)  # the others are displaced or refused
    wait_for(lambda: len(receiver._streams) <= 4)  # the receiver may remove a stream later than its peer sees the end
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
    """The context of a call without gRPC, so that nothing is sent before the test reads it."""

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


def test_eight_prefill_nodes_with_seventeen_prompts_each_are_let_in(peers, receiver_factory, raw):
    receiver, port = receiver_factory()
    states = []
    for _ in range(8):
        channel = None
        for _ in range(17):
            spec = peers.spec()
            receiver.inbox.open(spec, peers.sink())
            stream = raw(port, channel=channel)
            channel = stream.channel
            states.append(stream.ask(peers.hello(spec)).state)
    assert states == [AttachState.ATTACHED] * (8 * 17)
