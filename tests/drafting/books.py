"""A draft book on a clock that stands still, and messages for it."""

from __future__ import annotations

from outrider.drafting.book import DraftBook
from outrider.drafting.drafted_sequence import is_well_formed
from outrider.speculation.draft_stream import DraftStatus, SequenceProposals
from outrider.speculation.draft_tree import DraftTree
from outrider.speculation.prefix_hash import prefix_hash
from tests.support.draft_messages import start_of
from tests.support.fake_clock import FakeClock

VOCAB_SIZE = 1000


def take_updates(book, node):
    """Returns the updates for this node, with the features that they carry, as a link does."""
    updates, parts = book.begin_updates(node)
    return book.finish_updates(updates, parts, book.read_features(parts))


class Book:
    """A book with connected nodes, which methods name by number."""

    def __init__(self, num_nodes=1, *, num_connected=None, features=None):
        """`features`: the source of the features that the nodes need; None: they need none."""
        self.clock = FakeClock(100.0)
        self.needs_features = features is not None
        self.book = DraftBook(clock=self.clock, features=features)
        self.nodes = [self.book.nodes.add() for _ in range(num_nodes)]
        self.update, self.close, self.observe_step = self.book.update, self.book.close, self.book.observe_step
        for number in range(num_nodes if num_connected is None else num_connected):
            self.connect(number)

    def connect(self, number=0):
        self.book.connected(self.nodes[number], needs_features=self.needs_features)

    def disconnect(self, number=0):
        self.book.disconnected(self.nodes[number])

    def open(self, sequence_id, *prompt, num_wanted=3, **start):
        self.book.open(sequence_id, start_of(len(prompt), **start), prompt, num_wanted=num_wanted)

    def take(self, number=0):
        """Takes this node's updates, without those that close a sequence."""
        return [update for update in take_updates(self.book, self.nodes[number]) if not update.closed]

    def answer(self, *answers, node=0):
        """Returns whether the last answer was accepted as valid."""
        is_believed = None
        for answer in answers:
            is_sound = is_well_formed(answer, vocab_size=VOCAB_SIZE)
            is_believed = self.book.take_answer(self.nodes[node], answer, is_well_formed=is_sound)
        return is_believed

    def found(self, sequence_id=1):
        tree = self.book.find([sequence_id], wait_seconds=0.0).trees.get(sequence_id)
        return () if tree is None else tree.token_ids

    def is_waited_for(self, sequence_id=1, *, wait_seconds=0.002):
        return bool(self.book.find([sequence_id], wait_seconds=wait_seconds).missing)

    def is_late(self, number=0):
        return self.book.is_late(self.nodes[number])

    @property
    def num_sequences(self):
        return [node.num_sequences for node in self.nodes]

    @property
    def counters(self):
        return self.book.counters


def catching_up(update):
    return SequenceProposals(update.sequence_id, DraftStatus.CATCHING_UP, update.length)


def no_room(update):
    return SequenceProposals(update.sequence_id, DraftStatus.NO_ROOM)


def unknown_prefix(update):
    return SequenceProposals(update.sequence_id, DraftStatus.UNKNOWN_PREFIX)


def answer_to(update, *proposed, **changes):
    branches = (DraftTree(update.length, update.prefix_hash, proposed),) if proposed else ()
    values = {
        "sequence_id": update.sequence_id,
        "status": DraftStatus.PROPOSED if branches or "branches" in changes else DraftStatus.NOTHING,
        "acked_length": update.length,
        "acked_features": changes.pop("acked_features", 0),
        "branches": branches,
        **changes,
    }
    return SequenceProposals(**values)


def ahead_of(update, *assumed_and_proposed, **changes):
    """Returns branches of (assumed tokens, proposed tokens) after the update's own tokens."""
    branches = tuple(
        DraftTree(
            update.length + len(assumed),
            prefix_hash([*update.token_ids, *assumed]),
            tuple(proposed),
            probability=0.5,
        )
        for assumed, proposed in assumed_and_proposed
    )
    return answer_to(update, **{"branches": branches, "status": DraftStatus.AHEAD, **changes})
