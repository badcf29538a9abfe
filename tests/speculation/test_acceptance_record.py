"""What a sequence's verdicts say about its next draft."""

from __future__ import annotations

import random

import pytest

from outrider.speculation.acceptance_record import (
    PRIOR_ACCEPTANCE,
    SIBLING_ACCEPTANCE,
    Acceptance,
    AcceptanceRecord,
)
from outrider.speculation.draft_tree import ROOT, DraftTree


def record_of(verdicts=(), *, source=None, num_positions=5):
    record = AcceptanceRecord(source or Acceptance(), num_positions, step=0)
    for num_draft, num_accepted in verdicts:
        record.observe(min(num_accepted + 1, num_draft), num_accepted)
    return record


def test_a_new_sequence_is_taken_to_accept_what_its_proposer_is_taken_for():
    assert record_of().chain == pytest.approx([PRIOR_ACCEPTANCE**n for n in range(1, 6)])


@pytest.mark.parametrize("acceptance", [0.1, 0.5, 0.9])
def test_probabilities_are_calibrated(acceptance):
    chosen = random.Random(1)
    record = record_of()
    sums = [0.0] * 5
    for _ in range(2000):
        num_accepted = next((n for n in range(5) if chosen.random() >= acceptance), 5)
        record.observe(min(num_accepted + 1, 5), num_accepted)
        sums = [total + each for total, each in zip(sums, record.chain, strict=True)]
    means = [total / 2000 for total in sums]
    assert means == pytest.approx([acceptance**n for n in range(1, 6)], abs=0.05)


def test_positions_are_told_apart():
    record = record_of([(3, 1)] * 30)  # the first token is always right, the second never
    assert record.chain[0] > 0.8
    assert record.chain[1] < 0.25


def test_a_position_that_is_not_reached_any_more_is_taken_for_one_like_the_others():
    record = record_of([(3, 2)] * 30)
    assert record.chain[2] < 0.2
    for _ in range(60):
        record.observe(2, 2)
    assert record.chain[2] > 0.8


def test_what_has_changed_is_learnt_anew():
    record = record_of([(5, 0)] * 40 + [(5, 5)] * 20)
    assert record.chain[0] > 0.7


# Root children: 0, then 1; 0 has the children 2, then 3; 2 has the child 4.
TREE = DraftTree(9, token_ids=(10, 11, 12, 13, 14), parents=(ROOT, ROOT, 0, 0, 2))


def test_a_sibling_is_likely_as_far_as_those_before_it_are_wrong():
    record = record_of()
    draft, probabilities = record.rank(TREE)
    by_token = dict(zip(draft.token_ids, probabilities, strict=True))
    assert [by_token[token_id] for token_id in (10, 12, 14)] == pytest.approx(record.chain[:3])
    assert by_token[11] == pytest.approx((1 - by_token[10]) * SIBLING_ACCEPTANCE)
    assert by_token[13] == pytest.approx((by_token[10] - by_token[12]) * SIBLING_ACCEPTANCE)


def test_the_tokens_of_a_tree_are_ranked_with_parents_before_their_children():
    draft, probabilities = record_of().rank(TREE)
    assert draft.token_ids == (10, 12, 14, 11, 13)
    assert draft.is_well_formed
    assert sorted(probabilities, reverse=True) == list(probabilities)
    certain = record_of([(5, 5)] * 500)
    assert certain.rank(TREE)[0].is_well_formed


def test_a_tree_counts_like_a_chain_along_its_first_children():
    tree, chain = record_of(), record_of()
    for accepted, num_draft, num_accepted in [
        ((0, 2, 4), 3, 3),
        ((0, 3), 3, 1),
        ((1,), 3, 0),
        ((), 3, 0),
        ((0, 2), 3, 2),
    ]:
        tree.observe(*TREE.decisions(accepted, 3))
        chain.observe(min(num_accepted + 1, num_draft), num_accepted)
        assert tree.chain == pytest.approx(chain.chain)


def test_siblings_that_are_right_are_worth_more():
    rescued, lost = record_of(), record_of()
    for right in (0, 1) * 20:
        rescued.observe(*TREE.decisions((right,), 3))
        lost.observe(*TREE.decisions(() if right else (0,), 3))
    assert rescued.chain == pytest.approx(lost.chain)
    by_token = [dict(zip(ranked.token_ids, found, strict=True)) for ranked, found in map(ranked_tree, (rescued, lost))]
    assert by_token[0][11] > 5 * by_token[1][11]


def ranked_tree(record):
    return record.rank(TREE)
