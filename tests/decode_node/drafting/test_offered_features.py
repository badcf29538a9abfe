"""A draft node reads the features of prompts from a decode node's cache; updates carry those of steps."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from draft_node.draft_loop import DraftLoop
from outrider.drafting.book import DraftBook
from outrider.drafting.drafted_sequence import is_well_formed
from outrider.kv_transfer.config import KvTransferConfig
from outrider.kv_transfer.connectors import Connector
from outrider.node import FeatureFormat
from outrider.service.address import own_host, split_port
from outrider.speculation.draft_stream import (
    MAX_FEATURE_BYTES_PER_MESSAGE,
    DraftStatus,
    SequenceProposals,
)
from outrider.speculation.proposers.base import nothing
from tests.decode_node.drafting.feature_target import BLOCK_SIZE, FeatureTarget
from tests.drafting.books import take_updates
from tests.support.draft_messages import hello_of, start_of
from tests.support.fake_clock import FakeClock
from tests.support.fake_head import feature_bytes
from tests.support.scripted_proposer import ScriptedProposer
from tests.support.waiting import PATIENCE_SECONDS, wait_for

WIDE = FeatureFormat(fingerprint="ab" * 32, width=4096, dtype="bfloat16", taps=(1, 2))
NUM_CLIENTS = 16
PROMPT_LENGTH = 1000
ANSWER_LENGTH = 128
TOKENS_PER_STEP = 2


def wide_rows(token_ids, start, end) -> np.ndarray:
    """Returns features of tokens [start, end): each repeats a number that the token and its position determine."""
    numbers = (np.asarray(token_ids[start:end]) * 31 + np.arange(start, end)) % 60_000
    return np.repeat(numbers.astype(np.uint16)[:, None], WIDE.width, axis=1)


class WideHead(ScriptedProposer):
    """Has a draft if it has all features but the newest token's; records wrong ones."""

    def __init__(self):
        super().__init__([])
        self.info = replace(self.info, name="wide_head", features=WIDE)
        self.num_wrong = 0
        self.ready: dict[int, int] = {}  # by sequence: number of tokens of the last draft's prefix

    def propose(self, requests):
        for request in requests:
            length = len(request.features)
            if length:
                places = {0, length // 2, length - 1}
                self.num_wrong += any(
                    not np.array_equal(
                        request.features.read(place, place + 1), wide_rows(request.token_ids, place, place + 1)
                    )
                    for place in places
                )
            if length == len(request.token_ids) - 1:
                self.ready[request.start.sample] = len(request.token_ids)
        return [nothing(request) for request in requests]


@dataclass
class Sequence:
    token_ids: list[int]
    max_length: int
    num_steps: int = 0
    had_features: list[bool] = field(default_factory=list)


class Cluster:
    """A decode node's book and cache, and a draft node with a head."""

    def __init__(self, num_blocks: int):
        self.clock = FakeClock(100.0)
        self.target = FeatureTarget(
            num_blocks, offers=True, features=WIDE, bytes_of=lambda *part: wide_rows(*part).tobytes()
        )
        self.book = DraftBook(clock=self.clock, features=self.target.plane)
        self.node = self.book.nodes.add()
        self.book.connected(self.node, needs_features=True)
        self.head = WideHead()
        self.connector = Connector(KvTransferConfig(connector="grpc"))
        self.loop = DraftLoop(self.head, connector=self.connector)
        self.peer = self.loop.connect(hello_of(vocab_size=60_000, features=WIDE), lambda: None)
        self.sequences: dict[int, Sequence] = {}
        self.ended: list[Sequence] = []
        self.max_sent_bytes = 0

    def close(self):
        self.loop.disconnect(self.peer)
        self.loop.step()
        self.connector.close()
        self.target.stop()

    def open(self, key: int, answer_length: int = ANSWER_LENGTH, prompt_length: int = PROMPT_LENGTH):
        token_ids = [(key * 7919 + place * 104_729) % 60_000 for place in range(prompt_length)]
        start = replace(start_of(prompt_length, max_tokens=answer_length), sample=key)
        self.sequences[key] = Sequence(token_ids, prompt_length + answer_length)
        self.book.open(key, start, token_ids, num_wanted=5)

    def end(self, key: int):
        self.book.close(key)
        self.target.free(key)
        self.ended.append(self.sequences.pop(key))

    def commit(self):
        """Commits a step's tokens. What the engine's thread does."""
        self.clock.advance(0.03)
        for key, each in self.sequences.items():
            new = [(key + len(each.token_ids) + place) % 60_000 for place in range(TOKENS_PER_STEP)]
            each.token_ids += new
            self.book.update(key, new, num_wanted=5, kv=self.target.compute(key, each.token_ids))

    def exchange(self) -> list[SequenceProposals]:
        """Sends the newest states, and takes the answers."""
        updates = take_updates(self.book, self.node)
        self.max_sent_bytes = max(self.max_sent_bytes, sum(len(update.features) for update in updates))
        self.loop.submit(self.peer, updates)
        self.loop.step()
        answers = self.peer.take_answers()
        for answer in answers:
            assert self.book.take_answer(self.node, answer, is_well_formed=is_well_formed(answer, vocab_size=60_000)), (
                "it is honest"
            )
        return answers

    def settle(self):
        """Exchanges messages and reads what is offered, as if a step left time for that."""
        for _ in range(4):
            self.exchange()
        fetches = self.loop._fetches
        while fetches._busy:
            wait_for(lambda: not fetches._read.empty())
            self.exchange()
        for _ in range(2):
            self.exchange()

    def note(self):
        for key, each in self.sequences.items():
            each.had_features.append(self.head.ready.get(key) == len(each.token_ids))


@pytest.fixture
def make_cluster():
    with contextlib.ExitStack() as stack:

        def make(num_tokens: int) -> Cluster:
            cluster = Cluster(num_blocks=-(-num_tokens // BLOCK_SIZE))
            stack.callback(cluster.close)
            return cluster

        yield make


def test_a_wide_head_has_the_features_of_long_prompts_in_nearly_all_steps(make_cluster, monkeypatch):
    cluster = make_cluster(NUM_CLIENTS * (PROMPT_LENGTH + ANSWER_LENGTH + 2 * BLOCK_SIZE))
    next_key = 0
    for client in range(NUM_CLIENTS):  # they are in the midst of their answers
        cluster.open(next_key, ANSWER_LENGTH - client * ANSWER_LENGTH // NUM_CLIENTS)
        next_key += 1
    for _ in range(40):
        with monkeypatch.context() as forbidden:
            forbidden.setattr(cluster.target.plane, "read", None)  # the engine's thread copies nothing
            cluster.commit()
        cluster.settle()
        cluster.note()
        for key in [key for key, each in cluster.sequences.items() if len(each.token_ids) >= each.max_length]:
            cluster.end(key)
            cluster.open(next_key)
            next_key += 1
    steps = [had for each in [*cluster.ended, *cluster.sequences.values()] for had in each.had_features[1:]]
    assert len(steps) > 500
    assert sum(steps) > 0.9 * len(steps)
    assert cluster.head.num_wrong == 0
    assert cluster.max_sent_bytes <= MAX_FEATURE_BYTES_PER_MESSAGE


# Who stops, ends or is not there


def offered(cluster: Cluster, *keys: int):
    """Opens sequences whose features are offered and not read yet."""
    for key in keys:
        cluster.open(key)
    cluster.commit()
    updates = take_updates(cluster.book, cluster.node)
    assert all(update.feature_offer is not None for update in updates)
    return updates


def test_the_newest_sequences_are_read_first_and_one_at_a_time(make_cluster, monkeypatch):
    cluster = make_cluster(4 * 2 * PROMPT_LENGTH)
    order, may_connect = [], threading.Event()

    def connect(address, spec, *, _connect=cluster.connector.connect):
        order.append(spec.transfer_id)
        assert may_connect.wait(PATIENCE_SECONDS)
        return _connect(address, spec)

    monkeypatch.setattr(cluster.connector, "connect", connect)
    updates = offered(cluster, 0, 1, 2, 3)
    cluster.loop.submit(cluster.peer, updates)
    cluster.loop.step()
    wait_for(lambda: len(order) == 1)
    may_connect.set()
    fetches = cluster.loop._fetches
    while fetches._busy:
        wait_for(lambda: not fetches._read.empty())
        cluster.loop.step()
    ids = [update.feature_offer.transfer_id for update in updates]
    assert order == [ids[0], ids[3], ids[2], ids[1]], "the first one came before the others"
    assert {held.num_features for held in held_of(cluster)} == {PROMPT_LENGTH + TOKENS_PER_STEP - 1}


def held_of(cluster: Cluster):
    return [held for holding in cluster.loop._held._holdings.values() for held in holding.sequences.values()]


def test_a_node_that_never_reads_holds_no_block(make_cluster):
    cluster = make_cluster(3 * PROMPT_LENGTH)
    offered(cluster, 0)
    cluster.end(0)
    assert cluster.target.pool.num_free_blocks == cluster.target.pool.num_blocks
    assert not cluster.target.ingest.inbox._transfers


@pytest.mark.parametrize("is_preempted", [True, False], ids=["preempted", "ended"])
def test_blocks_that_pass_to_another_sequence_during_a_read_bring_no_features(make_cluster, monkeypatch, is_preempted):
    """The cache is read, then the blocks change hands, then the answer would be sent."""
    cluster = make_cluster(3 * PROMPT_LENGTH)
    read, reads = cluster.target.cache.read, []

    def read_and_lose(*arguments, **options):
        rows = read(*arguments, **options)
        reads.append(arguments)
        if len(reads) == 1:
            if is_preempted:
                cluster.target.free(0)
            else:
                cluster.end(0)
            cluster.open(1)
            cluster.target.compute(1, cluster.sequences[1].token_ids)
        return rows

    updates = offered(cluster, 0)
    monkeypatch.setattr(cluster.target.cache, "read", read_and_lose)
    cluster.loop.submit(cluster.peer, updates)
    cluster.loop.step()
    wait_for(lambda: not cluster.loop._fetches._read.empty())
    cluster.loop.step()
    (held,) = held_of(cluster)
    assert (held.num_features, held.is_fetching) == (0, False)
    assert reads
    monkeypatch.undo()
    if is_preempted:  # it is computed again, and offered again
        wait_for(lambda: cluster.target.failed)
        (answer,) = cluster.peer.take_answers()
        assert cluster.book.take_answer(cluster.node, answer, is_well_formed=True)
        cluster.commit()
        cluster.settle()
        cluster.note()
        assert cluster.sequences[0].had_features == [True]
        assert cluster.head.num_wrong == 0


def test_what_an_update_reads_from_lost_blocks_is_nothing():
    target = FeatureTarget()
    text = list(range(30))
    kv, other = target.compute(0, text), target.compute(1, text)
    ranges = [(kv, 5, 20), (other, 9, 29), (kv, 0, 40)]
    assert target.plane.read(ranges) == [feature_bytes(text, 5, 20), feature_bytes(text, 9, 29), None]
    target.free(0)
    assert target.plane.read(ranges) == [None, feature_bytes(text, 9, 29), None]
    assert target.plane.read(ranges[:1]) == [None]


def test_a_shared_block_is_not_read_until_its_copy_is_made(monkeypatch):
    """Samples share the last block of a prompt that the first has computed; it is copied before it is written."""
    target, text = FeatureTarget(offers=True), list(range(11))
    kv = target.compute(0, text)
    kv.fork()
    copies, read = kv.reserve(11), target.cache.read
    assert target.plane.read([(kv, 8, 10)]) == [None]
    assert target.plane.offer(kv, 10) is None

    def copy_during_the_read(*arguments):
        rows = read(*arguments)
        target.cache.copy_blocks(copies)
        kv.advance(10)
        return rows

    monkeypatch.setattr(target.cache, "read", copy_during_the_read)
    assert target.plane.read([(kv, 8, 10)]) == [None]
    assert target.plane.read([(kv, 8, 10)]) == [feature_bytes(text, 8, 10)]
    target.stop()


def test_a_node_that_listens_everywhere_offers_an_address_that_others_reach():
    target = FeatureTarget(offers=True, host="0.0.0.0")
    offer = target.plane.offer(target.compute(1, range(10)), 9)
    target.stop()
    assert split_port(offer.address)[0] == own_host()


def test_an_address_that_nobody_serves_costs_drafts_only(make_cluster):
    cluster = make_cluster(3 * PROMPT_LENGTH)
    (update,) = offered(cluster, 0)
    cluster.loop.submit(
        cluster.peer, [update._replace(feature_offer=update.feature_offer._replace(address="127.0.0.1:1"))]
    )
    cluster.loop.step()
    (answer,) = cluster.peer.take_answers()
    assert answer.status is DraftStatus.CATCHING_UP
    wait_for(lambda: not cluster.loop._fetches._read.empty())
    cluster.loop.step()
    (answer,) = cluster.peer.take_answers()
    assert (answer.status, answer.acked_features) == (DraftStatus.NOTHING, 0)
    assert not cluster.loop.has_work


def test_a_decode_node_that_goes_while_its_features_are_read_leaves_nothing_behind(make_cluster, monkeypatch):
    cluster = make_cluster(3 * PROMPT_LENGTH)
    is_reading, may_go_on = threading.Event(), threading.Event()

    def read_slowly(*arguments, _read=cluster.target.cache.read, **options):
        is_reading.set()
        assert may_go_on.wait(PATIENCE_SECONDS)
        return _read(*arguments, **options)

    monkeypatch.setattr(cluster.target.cache, "read", read_slowly)
    cluster.loop.submit(cluster.peer, offered(cluster, 0))
    cluster.loop.step()
    assert is_reading.wait(PATIENCE_SECONDS)
    cluster.loop.disconnect(cluster.peer)
    cluster.loop.step()
    fetches = cluster.loop._fetches
    wait_for(lambda: not fetches._read.empty())
    may_go_on.set()
    cluster.loop.step()
    assert not fetches._busy
    assert not fetches._waiting
    assert not held_of(cluster)
