from __future__ import annotations

import pytest

from draft_node.held_sequences import HeldSequence, HeldSequences
from outrider.request import SamplingParams
from outrider.speculation.draft_stream import DraftHello, DraftStatus, SequenceStart, SequenceUpdate
from outrider.speculation.prefix_hash import prefix_hash

HELLO = DraftHello(incarnation=bytes(16), name="d", vocab_size=100, vocabulary_fingerprint="", max_model_len=64)
START = SequenceStart(params=SamplingParams(seed=1, max_tokens=10), sample=0, prompt_length=2)


@pytest.fixture
def forgotten() -> list[int]:
    return []


@pytest.fixture
def held(forgotten) -> HeldSequences:
    return HeldSequences(max_sequences=2, on_forgotten=forgotten.append)


def update_of(text, since=0, sequence_id=1, **changes) -> SequenceUpdate:
    values = {
        "sequence_id": sequence_id,
        "start": START if since == 0 else None,
        "start_length": since,
        "token_ids": tuple(text[since:]),
        "length": len(text),
        "prefix_hash": prefix_hash(text),
        "num_wanted": 3,
        **changes,
    }
    return SequenceUpdate(**values)


def test_updates_extend_what_is_held_and_may_overlap_it(held):
    assert isinstance(held.apply(0, HELLO, update_of([1, 2])), HeldSequence)
    assert isinstance(held.apply(0, HELLO, update_of([1, 2, 3, 4], since=2)), HeldSequence)
    sequence = held.apply(0, HELLO, update_of([1, 2, 3, 4, 5], since=2))
    assert isinstance(sequence, HeldSequence)
    assert list(sequence.tokens.token_ids) == [1, 2, 3, 4, 5]


def test_an_unknown_prefix_is_called_so(held):
    assert held.apply(0, HELLO, update_of([1, 2, 3], since=2)) is DraftStatus.UNKNOWN_PREFIX


def test_a_hash_that_does_not_fit_the_tokens_needs_sync_and_forgets_them(held, forgotten):
    held.apply(0, HELLO, update_of([1, 2]))
    assert held.apply(0, HELLO, update_of([1, 2, 3], since=2, prefix_hash=99)) is DraftStatus.UNKNOWN_PREFIX
    assert len(held) == 0
    assert forgotten == [0]


def test_a_text_that_was_replaced_is_taken_from_its_start(held, forgotten):
    held.apply(0, HELLO, update_of([1, 2, 3]))
    sequence = held.apply(0, HELLO, update_of([9, 8]))
    assert isinstance(sequence, HeldSequence)
    assert list(sequence.tokens.token_ids) == [9, 8]
    assert forgotten == [0]


@pytest.mark.parametrize(
    "update",
    [
        update_of([1, 2], length=7),
        update_of([]),
        update_of([1, 100]),
        update_of([1] * 65),
    ],
    ids=["length", "empty", "vocabulary", "window"],
)
def test_nonsense_is_refused(held, update):
    assert held.apply(0, HELLO, update) is DraftStatus.NO_ROOM


def test_beyond_its_room_the_node_says_that_it_has_nothing(held):
    for sequence_id in range(2):
        held.apply(0, HELLO, update_of([1, 2], sequence_id=sequence_id))
    assert held.apply(0, HELLO, update_of([1, 2], sequence_id=2)) is DraftStatus.NO_ROOM
    held.close((0, 1))
    assert isinstance(held.apply(0, HELLO, update_of([1, 2], sequence_id=2)), HeldSequence)


def test_equal_ids_of_two_decode_nodes_are_two_sequences_and_go_with_their_node(held, forgotten):
    one = held.apply(0, HELLO, update_of([1, 2]))
    other = held.apply(1, HELLO, update_of([3, 4]))
    assert isinstance(one, HeldSequence)
    assert isinstance(other, HeldSequence)
    assert one.key != other.key
    held.close_peer(0)
    assert [sequence.key for sequence in held] == [other.key]
    assert forgotten == [one.key]
