from __future__ import annotations

import os
import queue
import threading

import grpc
import pytest
import xxhash

from outrider.engine.kv_cache.planes import PlaneSpec
from outrider.kv_transfer.base import FrameHeader, Region, TransferSpec
from outrider.kv_transfer.frames import METHOD, encode_frame
from outrider.kv_transfer.inbox import TransferInbox
from outrider.kv_transfer.receiver import KvReceiver
from tests.support.kv_messages import decode_receiver_message, encode_commit, encode_hello

INCARNATION = b"i" * 16
PLANES = (PlaneSpec("k", 4, 1, 4, "float32"), PlaneSpec("v", 2, 1, 8, "bfloat16"))
CELL_BYTES = 16


class RecordingSink:
    """Stores the bytes of every cell. Writes wait for `gate`."""

    def __init__(self):
        self.are_held = lambda: True
        self.cells = {}
        self.num_writes = 0
        self.gate = threading.Event()
        self.gate.set()
        self.is_writing = threading.Event()

    def read(self, region):
        """Returns KV from before the transfer, with the bytes that a sender would have sent."""
        return memoryview(Peers.payload(region))

    def write(self, region, payload):
        self.is_writing.set()
        assert self.gate.wait(60)
        data = bytes(payload) if isinstance(payload, memoryview) else payload.tensor.numpy().tobytes()
        at = 0
        for layer in region.layers:
            for token in region.tokens:
                self.cells[region.plane, layer, token] = data[at : at + CELL_BYTES]
                at += CELL_BYTES
        self.num_writes += 1


class Peers:
    """Frames and messages of a sender, and the callbacks of the receiving side."""

    incarnation = INCARNATION

    def __init__(self):
        self.news: queue.SimpleQueue = queue.SimpleQueue()
        self.completed = {}
        self.failed = {}

    def on_complete(self, transfer_id, stats):
        self.completed[transfer_id] = stats
        self.news.put(("complete", transfer_id))

    def on_failed(self, transfer_id, reason):
        assert transfer_id not in self.failed, "a failure is reported once"
        self.failed[transfer_id] = reason
        self.news.put(("failed", transfer_id))

    def new_inbox(self):
        return TransferInbox(incarnation=INCARNATION, on_complete=self.on_complete, on_failed=self.on_failed)

    def new_receiver(self, **options):
        return KvReceiver(
            incarnation=INCARNATION,
            host="127.0.0.1",
            on_complete=self.on_complete,
            on_failed=self.on_failed,
            **options,
        )

    @staticmethod
    def spec(*, start=3, end=13):
        return TransferSpec(
            transfer_id=os.urandom(16), incarnation=INCARNATION, start_token=start, end_token=end, planes=PLANES
        )

    @staticmethod
    def sink():
        return RecordingSink()

    @staticmethod
    def payload(region, *, salt=0):
        return b"".join(
            xxhash.xxh3_128_digest(f"{region.plane}/{layer}/{token}/{salt}".encode())
            for layer in region.layers
            for token in region.tokens
        )

    def frame(self, spec, region, *, salt=0, **changes):
        """Returns (header, payload) of a frame. `changes`: header fields with false values."""
        payload = self.payload(region, salt=salt)
        fields = {
            "transfer_id": spec.transfer_id,
            "incarnation": spec.incarnation,
            "region": region,
            "length": len(payload),
            "checksum": xxhash.xxh3_64_intdigest(payload),
        }
        return FrameHeader(**{**fields, **changes}), memoryview(payload)

    @staticmethod
    def regions(spec, *, num_tokens=4, num_layers=2):
        for plane in PLANES:
            for layer in range(0, plane.num_layers, num_layers):
                for token in range(spec.start_token, spec.end_token, num_tokens):
                    tokens = range(token, min(token + num_tokens, spec.end_token))
                    yield Region(plane.name, range(layer, layer + num_layers), tokens, range(1))

    def frames(self, spec):
        return [self.frame(spec, region) for region in self.regions(spec)]

    @staticmethod
    def sent(frames):
        """Returns the frames' checksums, by region."""
        return {header.region: header.checksum for header, _ in frames}

    @staticmethod
    def hello(spec, **offer):
        """Returns a sender's first message. `offer`: fields that offer an arena."""
        return encode_hello(spec.transfer_id, spec.incarnation, **offer)

    def finish(self, spec, stream):
        """Sends all frames and a commit, and returns the state in its answer."""
        frames = self.frames(spec)
        for sequence, frame in enumerate(frames, start=1000):
            stream.ask(encode_frame(sequence, *frame))
        return stream.ask(encode_commit(self.sent(frames))).state

    def expected_cells(self, spec):
        sink = RecordingSink()
        for region in self.regions(spec):
            sink.write(region, memoryview(self.payload(region)))
        return sink.cells


class RawStream:
    """A sender's stream on which a test can send any message."""

    def __init__(self, port, *messages, channel=None):
        """`channel`: that of another stream, whose connection is to be shared."""
        self.channel = channel or grpc.insecure_channel(
            f"127.0.0.1:{port}",
            options=[("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)],
        )
        self.outgoing: queue.SimpleQueue = queue.SimpleQueue()
        for message in messages:
            self.say(message)
        self.call = self.channel.stream_stream(METHOD)(iter(self.outgoing.get, None), timeout=60)

    def say(self, message):
        self.outgoing.put(message)

    def ask(self, message):
        self.say(message)
        return decode_receiver_message(next(self.call))

    def end(self):
        self.outgoing.put(None)
        self.channel.close()


@pytest.fixture
def raw():
    streams = []

    def open_stream(*arguments, **options):
        streams.append(RawStream(*arguments, **options))
        return streams[-1]

    yield open_stream
    for stream in streams:
        stream.end()


@pytest.fixture
def peers():
    return Peers()


@pytest.fixture
def inbox(peers):
    return peers.new_inbox()


@pytest.fixture
def receiver_factory(peers):
    """Returns a function that starts a receiver and returns it with its port."""
    receivers = []

    def make(**options):
        receiver = peers.new_receiver(**options)
        receivers.append(receiver)
        return receiver, receiver.start()

    yield make
    for receiver in receivers:
        receiver.stop()
