"""Pushes from a node with several ranks, here threads, to a real receiver: each rank sends what it holds."""

from __future__ import annotations

import os
import pickle
import queue
import threading

import numpy as np
import psutil
import pytest

from outrider.engine.kv_cache.base import slots_of
from outrider.engine.kv_cache.paged_cache import PagedKVCache
from outrider.engine.ranks.channel import Channel, RankLostError
from outrider.engine.ranks.sharded_cache import DividedKVCache
from outrider.errors import AbortedError, PeerLostError
from outrider.kv_transfer.base import Region, TransferSpec
from outrider.kv_transfer.config import KvTransferConfig
from outrider.kv_transfer.connectors import Connector
from outrider.kv_transfer.receiver import KvReceiver
from outrider.kv_transfer.receiver_stream import ReceiverStream
from outrider.kv_transfer.reserved_blocks import ReservedBlocks
from outrider.kv_transfer.sender import Sender
from outrider.kv_transfer.sender_stream import SenderStream
from outrider.rpc.tls import PLAINTEXT, PeerSecurity, SecurityConfig, TlsConfig
from prefill_node import rank_push
from prefill_node.push import KvPush
from prefill_node.rank_push import End, RankPush, RankPushed, RankPushes
from tests.support.kv_messages import encode_commit, encode_hello, encode_read
from tests.support.waiting import PATIENCE_SECONDS, wait_for
from tests.support.worker_ranks import BLOCK_SIZE, NUM_BLOCKS, NUM_LAYERS, Ranks

NUM_TOKENS = 2 * BLOCK_SIZE + 3
INCARNATION = b"r" * 16
SHAPES = {
    "heads": lambda: Ranks(2),
    "layers": lambda: Ranks(2, [range(1, 2), range(1)]),
    "blocks": lambda: Ranks(2, [range(NUM_LAYERS)] * 2, features=()),
}
BLOCK_IDS = {"heads": [4, 1, 2], "layers": [4, 1, 2], "blocks": [NUM_BLOCKS + 4, NUM_BLOCKS + 1, NUM_BLOCKS + 2]}


class ReadGate:
    """Reads of KV in rank 1 wait for `gate`."""

    def __init__(self, ranks):
        self.gate, self.is_reading, self.num_ended = threading.Event(), threading.Event(), 0
        self.gate.set()
        (cache,) = ranks.caches[1:]
        self._read, cache.read = cache.read, self.read

    def read(self, *arguments, **options):
        self.is_reading.set()
        assert self.gate.wait(PATIENCE_SECONDS)
        payload = self._read(*arguments, **options)
        self.num_ended += 1
        return payload


class Rig:
    """Ranks with random KV, a receiver with a cache of its own, and the connector of rank 0."""

    def __init__(self, shape, connector, security=PLAINTEXT):
        self.ranks = SHAPES[shape]()
        if shape == "blocks":
            self.ranks.cache = DividedKVCache(self.ranks.caches[0], self.ranks.group)
        self.cache, self.block_ids = self.ranks.cache, BLOCK_IDS[shape]
        for cache in self.ranks.caches:
            for plane in cache.planes:
                for layer in cache.layers(plane.name):
                    layer.normal_()
        self.theirs = PagedKVCache(self.cache.planes, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
        self.failed, self.completed, self.streams = {}, {}, []
        self.receiver = KvReceiver(
            incarnation=INCARNATION,
            host="127.0.0.1",
            on_complete=self.completed.__setitem__,
            on_failed=self.failed.__setitem__,
            connectors=(connector,),
            security=security,
        )
        self.address = f"127.0.0.1:{self.receiver.start()}"
        self.connector = Connector(KvTransferConfig(connector=connector), security)
        self.reads = ReadGate(self.ranks)
        self.outcomes = queue.SimpleQueue()

    def spec(self, *, is_open=True):
        spec = TransferSpec(
            transfer_id=os.urandom(16),
            incarnation=INCARNATION,
            start_token=0,
            end_token=NUM_TOKENS,
            planes=self.cache.planes,
        )
        if is_open:
            self.receiver.inbox.open(spec, ReservedBlocks(self.theirs, [0, 1, 2]))
        return spec

    def push(self, spec, layers=range(NUM_LAYERS), *, finishes=True):
        """Starts a push and offers these layers and the features."""
        push = KvPush(
            connector=self.connector,
            kv_cache=self.cache,
            address=self.address,
            spec=spec,
            block_ids=self.block_ids,
            on_ended=self.outcomes.put,
        )
        push.start()
        for layer in layers:
            push.offer(range(layer, layer + 1), 0, NUM_TOKENS)
        push.offer(None, 0, NUM_TOKENS)
        if finishes:
            push.finish()
        return push

    def outcome(self):
        return self.outcomes.get(timeout=PATIENCE_SECONDS)

    def assert_equal(self):
        for plane in self.cache.planes:
            layers = range(plane.num_layers)
            sent = self.cache.read(plane.name, layers, slots_of(self.block_ids, NUM_TOKENS, BLOCK_SIZE))
            assert np.array_equal(self.theirs.read(plane.name, layers, np.arange(NUM_TOKENS)), sent)

    def close(self):
        self.ranks.close()
        self.connector.close()
        self.receiver.stop()


@pytest.fixture(params=["grpc", "shared_memory"])
def connector(request):
    return request.param


@pytest.fixture(params=sorted(SHAPES))
def rig(request, connector):
    rig = Rig(request.param, connector)
    yield rig
    rig.close()


@pytest.fixture
def stages():
    rig = Rig("layers", "grpc")
    yield rig
    rig.close()


def test_each_rank_sends_what_it_holds(rig, monkeypatch):
    senders, put = {}, Sender.put

    def record(sender, region, payload):
        senders.setdefault(sender, []).append(region)
        put(sender, region, payload)

    monkeypatch.setattr(Sender, "put", record)
    with monkeypatch.context() as patch:
        patch.setattr(rig.ranks.group, "ask", None)  # no KV passes through rank 0
        spec = rig.spec()
        rig.push(spec)
        outcome = rig.outcome()
    assert outcome.error is None
    rig.assert_equal()
    num_bytes = sum(plane.bytes_per_token for plane in rig.cache.planes) * NUM_TOKENS
    assert outcome.kv_bytes == sum(part.amount for part in outcome.pushed) == num_bytes
    assert rig.completed[spec.transfer_id].payload_bytes == num_bytes
    assert all(part.end_seconds <= outcome.committed_at for part in outcome.pushed)
    num_other = 1 if rig.block_ids[0] >= NUM_BLOCKS else 2  # rank 0 has nothing to send if it has no block
    assert len(senders) == num_other
    join_all("rank-task")


def join_all(name):
    """Waits for the end of all threads with this name."""
    for thread in [thread for thread in threading.enumerate() if thread.name == name]:
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()


def test_all_ranks_use_the_certificate_of_the_node(tls_folder):
    tls = TlsConfig(
        authority=tls_folder / "ca.pem", certificate=tls_folder / "node.pem", private_key=tls_folder / "node-key.pem"
    )
    rig = Rig("layers", "grpc", PeerSecurity(SecurityConfig(tls=tls)))
    try:
        rig.push(rig.spec())
        assert rig.outcome().error is None
        rig.assert_equal()
    finally:
        rig.close()


def test_a_transfer_without_one_rank_s_frames_is_not_committed(stages):
    stages.push(stages.spec(), layers=range(1, 2))
    outcome = stages.outcome()
    assert isinstance(outcome.error, AbortedError)
    assert outcome.error.reason == "TRANSFER_INCOMPLETE"


def test_checksums_of_other_ranks_are_part_of_the_commit(stages, monkeypatch):
    include = Sender.include
    monkeypatch.setattr(Sender, "include", lambda self, sent, **more: include(self, dict.fromkeys(sent, 0), **more))
    stages.push(stages.spec())
    outcome = stages.outcome()
    assert outcome.error.reason == "TRANSFER_INCOMPLETE"
    assert "other KV than was sent" in outcome.error.message


def test_an_interrupted_push_ends_when_no_rank_reads_kv_any_more(stages):
    """Otherwise the blocks could get KV of another sequence, and that be sent."""
    stages.reads.gate.clear()
    push = stages.push(stages.spec())
    assert stages.reads.is_reading.wait(PATIENCE_SECONDS)
    push.interrupt()
    with pytest.raises(queue.Empty):
        stages.outcomes.get(timeout=0.2)
    stages.reads.gate.set()
    assert isinstance(stages.outcome().error, AbortedError)
    assert stages.reads.num_ended == 1, "rank 1 does not begin another frame"
    assert stages.receiver.inbox.counters()["frames_written"] <= 4


def test_the_commit_waits_for_frames_of_other_ranks(stages, monkeypatch):
    """Meanwhile rank 0 tells the receiver that it is alive."""
    told, commits, commit = threading.Event(), [], Sender.commit
    monkeypatch.setattr(Sender, "commit", lambda self: commits.append(stages.reads.gate.is_set()) or commit(self))
    monkeypatch.setattr(rank_push, "POLL_SECONDS", 0.001)
    stages.reads.gate.clear()
    settle = RankPushes.settle

    def settle_slowly(self, sender):
        known = sender.keep_alive
        sender.keep_alive = lambda **more: (known(**more), told.set())
        return settle(self, sender)

    monkeypatch.setattr(RankPushes, "settle", settle_slowly)
    stages.push(stages.spec())
    assert told.wait(PATIENCE_SECONDS)
    stages.reads.gate.set()
    assert stages.outcome().error is None
    assert commits == [True]
    stages.assert_equal()


def test_the_receiver_hears_of_rank_0_while_only_another_rank_sends(stages, monkeypatch):
    """It expires a silent stream, and with that of rank 0 the transfer. Offers come sooner here than keep-alives."""
    monkeypatch.setattr(KvTransferConfig, "keep_alive_seconds", 600.0)
    told, keep_alive = queue.SimpleQueue(), SenderStream.keep_alive
    monkeypatch.setattr(SenderStream, "keep_alive", lambda self, **more: (told.put(self), keep_alive(self, **more)))
    spec = stages.spec()
    push = stages.push(spec, layers=(), finishes=False)
    for start in range(0, NUM_TOKENS, BLOCK_SIZE):
        push.offer(range(1), start, min(start + BLOCK_SIZE, NUM_TOKENS))
        assert not told.get(timeout=PATIENCE_SECONDS)._is_part
    push.offer(range(1, 2), 0, NUM_TOKENS)
    push.finish()
    assert stages.outcome().error is None
    stages.assert_equal()


@pytest.fixture
def without_parts(monkeypatch):
    """A receiver that refuses parts, like one of an older version."""
    connect = Connector.connect

    def connect_unless_part(self, address, spec, *, is_part=False):
        if is_part:
            raise AbortedError("the receiver has another sender")
        return connect(self, address, spec)

    monkeypatch.setattr(Connector, "connect", connect_unless_part)


def test_the_error_of_another_rank_is_the_error_of_the_push(stages, without_parts):
    stages.push(stages.spec(), layers=range(1))
    outcome = stages.outcome()
    assert isinstance(outcome.error, AbortedError)
    assert outcome.error.message == "the receiver has another sender"


def test_a_push_ends_at_the_next_frame_of_a_rank_that_has_failed(stages, without_parts):
    """The rest of the prompt need not be computed."""
    push = stages.push(stages.spec(), layers=(), finishes=False)
    while stages.outcomes.empty():
        push.offer(range(1), 0, BLOCK_SIZE)
        push.join(0.01)
    assert stages.outcome().error.message == "the receiver has another sender"


def test_a_cancelled_push_does_not_wait_for_frames_of_other_ranks(stages):
    push = stages.push(stages.spec(), finishes=False)
    wait_for(lambda: stages.reads.num_ended)
    push.interrupt()
    assert isinstance(stages.outcome().error, AbortedError)


def test_many_pushes_leave_no_threads_and_descriptors(stages):
    def resources():
        return threading.active_count(), psutil.Process().num_fds()

    def push():
        stages.push(stages.spec())
        assert stages.outcome().error is None

    push()
    before = resources()
    for _ in range(20):
        push()
    wait_for(lambda: all(now <= then + 2 for now, then in zip(resources(), before, strict=True)))


def test_a_frame_of_another_rank_that_the_receiver_refuses_fails_the_push(stages, monkeypatch):
    monkeypatch.setattr(
        ReservedBlocks, "write", lambda self, region, payload: (_ for _ in ()).throw(OSError("no room"))
    )
    spec = stages.spec()
    stages.push(spec)
    assert isinstance(stages.outcome().error, AbortedError)
    assert "no room" in stages.failed[spec.transfer_id]


def test_a_rank_that_does_not_answer_is_killed(stages, monkeypatch):
    """Otherwise it might send KV of blocks that belong to another sequence by then."""
    killed = []
    monkeypatch.setattr(stages.ranks.group.members[0].process, "kill", lambda: killed.append(True))
    monkeypatch.setattr(RankPush, "run", lambda self, read, channel: None)
    stages.push(stages.spec())
    assert isinstance(stages.outcome().error, RankLostError)
    assert killed


@pytest.fixture
def inbox_stream(stages):
    """A transfer, and a function that makes streams to its receiver."""

    spec = stages.spec()

    def attach(**fields):
        stream = ReceiverStream(inbox=stages.receiver.inbox, readers={"grpc": None}, cancel=lambda: None)
        stream.handle(encode_hello(spec.transfer_id, INCARNATION, **fields))
        return stream

    return spec, attach


def test_the_end_of_a_part_s_stream_ends_no_transfer_and_that_of_the_other_does(stages, inbox_stream):
    spec, attach = inbox_stream
    assert not attach(is_part=True).is_attached, "parts come later"
    main, parts = attach(), [attach(is_part=True), attach(is_part=True)]
    assert all(stream.is_attached for stream in (main, *parts))
    assert not attach().is_attached, "only one stream commits"
    for message in (encode_commit({}), encode_read(Region("k", range(1), range(1), range(1)))):
        assert parts[0].handle(message) is None
    assert stages.receiver.inbox.counters()["messages_malformed"] == 2
    parts[0].break_off()
    parts[1].expire()
    assert not stages.failed
    main.break_off()
    assert list(stages.failed) == [spec.transfer_id]
    assert not attach(is_part=True).is_attached


def test_messages_to_ranks_can_be_pickled(stages):
    task = RankPush(KvTransferConfig(), SecurityConfig(), stages.address, stages.spec())
    for message in (task, End(is_complete=True), RankPushed({}, 0, ()), PeerLostError("gone", node="d:1")):
        copy = pickle.loads(pickle.dumps(message))
        assert vars(copy) == vars(message) if isinstance(message, Exception) else copy == message
    assert hash(task.config) == hash(KvTransferConfig())


def test_what_the_module_of_tasks_needs_is_imported_at_the_start(stages, monkeypatch):
    ran = queue.SimpleQueue()
    monkeypatch.setattr("prefill_node.rank_push.Preparation.run", lambda self, read, channel: ran.put(channel))
    RankPushes.prepare(stages.ranks.group, stages.connector)
    assert isinstance(ran.get(timeout=PATIENCE_SECONDS), Channel)
