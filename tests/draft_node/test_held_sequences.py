from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draft_node.draft_peer import DraftPeer
from draft_node.held_sequences import BYTES_PER_SEQUENCE, BYTES_PER_TOKEN, HeldSequence, HeldSequences, max_held_bytes
from outrider.speculation.draft_stream import DraftStatus
from tests.support.draft_messages import hello_of, update_of
from tests.support.fake_head import FEATURES, feature_bytes, features_of
from tests.support.memory import traced


def peer_of(peer_id) -> DraftPeer:
    return DraftPeer(peer_id, hello_of(max_model_len=64), lambda: None)


PEER, OTHER = peer_of(0), peer_of(1)


@pytest.fixture
def forgotten() -> list[int]:
    return []


@pytest.fixture
def held(forgotten) -> HeldSequences:
    return HeldSequences(max_sequences=4, max_tokens=80, on_forgotten=lambda held: forgotten.append(held.key))


def open_some(held, peer, number, *, text=(1, 2)) -> list[HeldSequence | DraftStatus]:
    return [held.apply(peer, update_of(text, sequence_id=sequence_id)) for sequence_id in range(number)]


def num_held(held) -> dict[int, int]:
    return {peer_id: len(each.sequences) for peer_id, each in held._holdings.items() if each.sequences}


def test_updates_extend_what_is_held_and_may_overlap_it(held):
    first = held.apply(PEER, update_of([1, 2]))
    for text in ([1, 2, 3, 4], [1, 2, 3, 4, 5]):
        assert held.apply(PEER, update_of(text, since=2)) is first
        assert list(first.tokens.token_ids) == text


def test_a_hash_that_does_not_fit_the_tokens_needs_sync_and_forgets_them(held, forgotten):
    held.apply(PEER, update_of([1, 2]))
    assert held.apply(PEER, update_of([1, 2, 3], since=2, prefix_hash=99)) is DraftStatus.UNKNOWN_PREFIX
    assert len(held) == 0
    assert forgotten == [0]


def test_a_text_that_was_replaced_is_taken_from_its_start(held, forgotten):
    held.apply(PEER, update_of([1, 2, 3]))
    sequence = held.apply(PEER, update_of([9, 8]))
    assert list(sequence.tokens.token_ids) == [9, 8]
    assert forgotten == [0]


@pytest.mark.parametrize(
    "update",
    [update_of([1, 2], length=7), update_of([]), update_of([1, 100]), update_of([1] * 65)],
    ids=["length", "empty", "vocabulary", "window"],
)
def test_nonsense_is_refused(held, update):
    assert held.apply(PEER, update) is DraftStatus.NO_ROOM
    assert len(held) == 0


def test_one_decode_node_alone_may_use_all_room_but_no_more(held):
    *inside, outside = open_some(held, PEER, 5)
    assert all(isinstance(each, HeldSequence) for each in inside)
    assert outside is DraftStatus.NO_ROOM
    held.close(PEER, 0)
    assert isinstance(held.apply(PEER, update_of([1, 2], sequence_id=4)), HeldSequence)


def test_a_decode_node_that_has_filled_all_room_gives_another_its_share(held, forgotten):
    open_some(held, PEER, 4)
    held.apply(PEER, update_of([1, 2, 3], since=2, sequence_id=0))  # sequence 0 is no longer the least recently updated
    outcomes = open_some(held, OTHER, 3)
    assert [isinstance(each, HeldSequence) for each in outcomes] == [True, True, False]
    assert num_held(held) == {0: 2, 1: 2}
    assert forgotten == [1, 2]
    assert open_some(held, PEER, 5)[4] is DraftStatus.NO_ROOM
    assert num_held(held) == {0: 2, 1: 2}


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9), st.integers(1, 60)), max_size=80))
def test_whatever_is_sent_all_bounds_hold_and_who_asks_for_little_gets_it(updates):
    held = HeldSequences(max_sequences=4, max_tokens=80, on_forgotten=lambda _: None)
    peers = [peer_of(peer_id) for peer_id in range(3)]
    for peer_id, sequence_id, length in updates:
        had_none = num_held(held).get(peer_id, 0) == 0
        outcome = held.apply(peers[peer_id], update_of([7] * length, sequence_id=sequence_id))
        assert len(held) <= 4
        assert sum(len(each.tokens) for holding in held._holdings.values() for each in holding.sequences.values()) <= 80
        assert isinstance(outcome, HeldSequence) or not had_none or length > 80 // 3


def test_equal_ids_of_two_decode_nodes_are_two_sequences_and_go_with_their_node(held, forgotten):
    one, other = held.apply(PEER, update_of([1, 2])), held.apply(OTHER, update_of([3, 4]))
    assert one.key != other.key
    held.close_peer(PEER.peer_id)
    assert num_held(held) == {1: 1}
    assert forgotten == [one.key]


def test_memory_is_what_the_node_counts():
    texts = [[2000 + (7 * place + key) % 40_000 for place in range(3000)] for key in range(20)]
    updates = [update_of(text, sequence_id=key) for key, text in enumerate(texts)]
    peer = peer_of(0)
    peer.hello = dataclasses.replace(peer.hello, vocab_size=50_000, max_model_len=4096)
    held = HeldSequences(on_forgotten=lambda _: None)
    with traced() as size:
        for update in updates:
            copied = update._replace(token_ids=tuple(token_id + 1 - 1 for token_id in update.token_ids))
            assert isinstance(held.apply(peer, copied), HeldSequence)
            del copied
        assert size() <= 20 * (3000 * BYTES_PER_TOKEN + BYTES_PER_SEQUENCE)


# Features


@pytest.fixture
def held_with_features(forgotten) -> HeldSequences:
    return HeldSequences(
        max_sequences=4,
        max_tokens=1000,
        features=FEATURES,
        max_feature_bytes=20 * FEATURES.bytes_per_token,
        on_forgotten=lambda held: forgotten.append(held.key),
    )


def update_with(text, start, end, **changes):
    return update_of(text, **changes)._replace(feature_start=start, features=feature_bytes(text, start, end))


def test_features_may_lag_behind_the_tokens_and_overlap(held_with_features):
    text = list(range(1, 11))
    held = held_with_features
    sequence = held.apply(PEER, update_of(text[:5]))
    assert sequence.num_features == 0
    for update in (
        update_with(text[:8], 0, 3, since=5),
        update_with(text[:8], 2, 7, since=8),
        update_with(text, 7, 9, since=8),
    ):
        assert held.apply(PEER, update) is sequence
    assert np.array_equal(sequence.features.read(0, sequence.num_features), features_of(text[:9]))


def test_features_behind_a_gap_are_an_unknown_prefix(held_with_features):
    assert held_with_features.apply(PEER, update_with([1, 2, 3, 4], 1, 3)) is DraftStatus.UNKNOWN_PREFIX
    assert len(held_with_features) == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"features": bytes(FEATURES.bytes_per_token + 1)},
        {"features": bytes(1)},
        {"features": bytes(4 * FEATURES.bytes_per_token)},
        {"feature_start": 4},
        {"feature_start": 2**32 - 1},
        {"feature_start": 3, "features": bytes(FEATURES.bytes_per_token)},
    ],
    ids=["odd", "a byte", "of the newest token", "start at the end", "start beyond", "end beyond"],
)
def test_features_that_cannot_be_are_refused(held_with_features, changes):
    assert held_with_features.apply(PEER, update_of([1, 2, 3, 4])._replace(**changes)) is DraftStatus.NO_ROOM
    assert len(held_with_features) == 0


def test_room_is_counted_in_features_and_shared_by_them(held_with_features, forgotten):
    held, text = held_with_features, list(range(1, 12))
    for sequence_id in (0, 1):
        assert isinstance(held.apply(PEER, update_with(text, 0, 10, sequence_id=sequence_id)), HeldSequence)
    assert held.apply(PEER, update_with(text, 0, 1, sequence_id=2)) is DraftStatus.NO_ROOM
    assert isinstance(held.apply(PEER, update_of(text, sequence_id=3)), HeldSequence), "it has none yet"
    assert isinstance(held.apply(OTHER, update_with(text, 0, 5)), HeldSequence)
    assert forgotten == [0], "of the one that holds more, what was updated longest ago"
    held.close(PEER, 1)
    assert isinstance(held.apply(PEER, update_with(text, 0, 10, sequence_id=3)), HeldSequence)


def test_a_text_that_was_replaced_begins_without_features(held_with_features):
    held_with_features.apply(PEER, update_with([1, 2, 3], 0, 2))
    assert held_with_features.apply(PEER, update_of([9, 8, 7])).num_features == 0


def test_memory_of_features_is_what_the_node_counts():
    features = dataclasses.replace(FEATURES, width=256)
    held = HeldSequences(on_forgotten=lambda _: None, features=features)
    peer = peer_of(0)
    peer.hello = dataclasses.replace(peer.hello, max_model_len=4096)
    text = [7] * 2001
    with traced() as size:
        for sequence_id in range(4):
            for start in range(0, 2000, 50):
                update = update_of(text, sequence_id=sequence_id)
                payload = bytes(50 * features.bytes_per_token)
                assert isinstance(
                    held.apply(peer, update._replace(feature_start=start, features=payload)), HeldSequence
                )
        used = size()
    tokens = 4 * (2001 * BYTES_PER_TOKEN + BYTES_PER_SEQUENCE)
    assert 0.9 * 8000 * features.bytes_per_token < used <= tokens + 9 / 8 * 8000 * features.bytes_per_token
    assert max_held_bytes(has_head=True) > max_held_bytes(has_head=False)
