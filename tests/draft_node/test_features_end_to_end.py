"""A decode node's book and draft loops with a head, with serialized messages: features arrive a few at a time.

Many at a time are read by another connection, which tests/decode_node/drafting/test_offered_features.py has.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draft_node.draft_loop import DraftLoop
from outrider.drafting import drafted_sequence
from outrider.drafting.book import DraftBook
from outrider.drafting.drafted_sequence import is_well_formed
from outrider.speculation.draft_stream import SequenceProposals
from outrider.v1 import draft_pb2
from outrider.wire.draft import proposals_from_proto, proposals_to_proto, update_from_proto, updates_to_proto
from tests.decode_node.drafting.feature_target import FeatureTarget
from tests.drafting.books import take_updates
from tests.fuzz.messages import fuzzed
from tests.support.draft_messages import hello_of, start_of
from tests.support.fake_clock import FakeClock
from tests.support.fake_head import FEATURES, FakeHead, feature_bytes

VOCAB_SIZE = 100
NUM_SEQUENCES = 3
NUM_NODES = 2
PROMPT_LENGTH = 11
TEXTS = [[(key * 31 + place * place * 7) % VOCAB_SIZE for place in range(400)] for key in range(NUM_SEQUENCES)]
SENT_TOKENS = 7  # at most, with features in one update


class DraftSide:
    """One draft node and its stream."""

    def __init__(self):
        self.head = FakeHead(TEXTS)
        self.loop = DraftLoop(self.head)
        self.peer = self.loop.connect(hello_of(vocab_size=VOCAB_SIZE, features=FEATURES), lambda: None)

    def exchange(self, message: bytes) -> list[SequenceProposals]:
        received = draft_pb2.DraftUpdate.FromString(message)
        self.loop.submit(self.peer, [update_from_proto(each) for each in received.sequences])
        self.loop.step()
        sent = draft_pb2.DraftProposals(sequences=map(proposals_to_proto, self.peer.take_answers()))
        received = draft_pb2.DraftProposals.FromString(sent.SerializeToString())
        return [proposals_from_proto(each) for each in received.sequences]

    def held(self) -> list[tuple[list[int], bytes]]:
        """Returns the tokens and features of each sequence."""
        return [
            (held.tokens.token_ids, bytes(held.features._data))
            for holding in self.loop._held._holdings.values()
            for held in holding.sequences.values()
        ]


class Cluster:
    def __init__(self):
        self.clock = FakeClock(100.0)
        self.target = FeatureTarget()
        self.book = DraftBook(clock=self.clock, features=self.target.plane)
        self.nodes = [self.book.nodes.add() for _ in range(NUM_NODES)]
        self.sides = [DraftSide() for _ in range(NUM_NODES)]
        self.num_committed = [PROMPT_LENGTH] * NUM_SEQUENCES
        for node in self.nodes:
            self.book.connected(node, needs_features=True)
        for key, text in enumerate(TEXTS):
            self.book.open(key, start_of(PROMPT_LENGTH), text[:PROMPT_LENGTH], num_wanted=3)

    def step(self, num_tokens: int) -> None:
        """Runs a step of the engine."""
        self.clock.advance(0.02)
        for key, text in enumerate(TEXTS):
            old = self.num_committed[key]
            self.num_committed[key] = min(old + num_tokens, len(text) - 20)
            kv = self.target.compute(key, text[: self.num_committed[key]])
            self.book.update(key, text[old : self.num_committed[key]], num_wanted=3, kv=kv)

    def preempt(self, number: int) -> None:
        """Frees a sequence's blocks; the next step computes it again, in other blocks."""
        if number in self.target.tables:
            self.target.free(number)

    def exchange(self, number: int) -> None:
        node, side = self.nodes[number], self.sides[number]
        updates = take_updates(self.book, node)
        for answer in side.exchange(updates_to_proto(updates, step_seconds=0.02).SerializeToString()):
            is_sound = is_well_formed(answer, vocab_size=VOCAB_SIZE)
            assert self.book.take_answer(node, answer, is_well_formed=is_sound), "it is honest"

    def work(self, num_tokens: int) -> None:
        self.step(num_tokens)
        for number in range(NUM_NODES):
            self.exchange(number)

    def forget(self, number: int) -> None:
        """Evicts all sequences of a draft node, as if another decode node had needed the room."""
        side = self.sides[number]
        for held in [held for holding in side.loop._held._holdings.values() for held in holding.sequences.values()]:
            side.loop._held.close(side.peer, held.sequence_id)

    def lose(self, number: int) -> None:
        """Replaces a draft node's process by another one, which connects at once."""
        self.book.disconnected(self.nodes[number])
        self.sides[number] = DraftSide()
        self.book.connected(self.nodes[number], needs_features=True)

    def send_into_the_void(self, number: int) -> None:
        """Ends the stream while a message is in transit."""
        take_updates(self.book, self.nodes[number])
        self.lose(number)

    def assert_sound(self) -> None:
        """Asserts that draft nodes hold the plane's features of their tokens."""
        for side in self.sides:
            assert not side.head.wrong
            for token_ids, features in side.held():
                num_tokens = len(features) // FEATURES.bytes_per_token
                assert num_tokens < len(token_ids)
                assert features == feature_bytes(token_ids, 0, num_tokens)

    def assert_drafts(self) -> None:
        found = self.book.find(range(NUM_SEQUENCES), wait_seconds=0.0).trees
        assert {key: tree.token_ids for key, tree in found.items()} == {
            key: tuple(text[num : num + 3])
            for key, (text, num) in enumerate(zip(TEXTS, self.num_committed, strict=True))
        }


NUMBERS = st.integers(0, NUM_NODES - 1)
EVENTS = st.one_of(
    st.tuples(st.just("work"), st.integers(0, 5)),
    st.tuples(st.just("work"), st.integers(0, 5)),
    st.tuples(st.just("step"), st.integers(0, 5)),
    st.tuples(st.just("exchange"), NUMBERS),
    st.tuples(st.just("lose"), NUMBERS),
    st.tuples(st.just("send_into_the_void"), NUMBERS),
    st.tuples(st.just("forget"), NUMBERS),
    st.tuples(st.just("preempt"), st.integers(0, NUM_SEQUENCES - 1)),
)


@pytest.fixture(autouse=True)
def _small_updates(monkeypatch):
    limit = SENT_TOKENS * FEATURES.bytes_per_token
    monkeypatch.setattr(drafted_sequence, "MAX_FEATURE_BYTES_PER_UPDATE", limit)


def settle(cluster: Cluster) -> None:
    """Runs enough steps without failures to send all features, after which all sequences must have drafts."""
    cluster.clock.advance(10.0)
    cluster.step(1)
    for _ in range(sum(cluster.num_committed) // SENT_TOKENS + 5):
        cluster.work(0)
    cluster.assert_sound()
    cluster.assert_drafts()


@fuzzed(25)
@given(events=st.lists(EVENTS, min_size=10, max_size=40))
def test_whatever_is_lost_forgotten_or_moved_features_arrive_bit_by_bit_and_all_have_drafts_in_the_end(events):
    cluster = Cluster()
    cluster.work(1)
    for name, argument in events:
        getattr(cluster, name)(argument)
        cluster.assert_sound()
    settle(cluster)


def test_in_a_steady_state_each_step_sends_each_feature_once():
    cluster = Cluster()
    settle(cluster)
    sent = 0
    for _ in range(10):
        cluster.step(2)
        for number in range(NUM_NODES):
            updates = take_updates(cluster.book, cluster.nodes[number])
            sent += sum(len(update.features) for update in updates)
            message = updates_to_proto(updates, step_seconds=0.02).SerializeToString()
            for answer in cluster.sides[number].exchange(message):
                cluster.book.take_answer(cluster.nodes[number], answer, is_well_formed=True)
        cluster.assert_drafts()
    assert sent == 10 * 2 * NUM_SEQUENCES * FEATURES.bytes_per_token
