"""One verification: which tokens it commits, and why a sample ends."""

from __future__ import annotations

import pytest

from decode_node.step import apply_stop_conditions, speculation_counts
from outrider.request import FinishReason, TokenLogprobs
from outrider.speculation.draft_tree import ROOT, DraftTree
from outrider.speculation.verify.base import Verified
from outrider.speculation.verify.coupled import accept


def judged(draft, target, *, stops=(), left=100):
    token_ids = accept(draft, target)
    return apply_stop_conditions(
        Verified(token_ids, tuple(TokenLogprobs(token, -1.0, 1) for token in token_ids)),
        DraftTree(0, token_ids=tuple(draft)),
        stop_token_ids=frozenset(stops),
        num_tokens_left=left,
    )


STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


@pytest.mark.parametrize(
    ("target", "stops", "left", "committed", "reason"),
    [
        ((5, 6, 7, 8), (), 100, (5, 6, 7, 8), None),
        ((5, 9, 7, 8), (), 100, (5, 9), None),
        ((5, 6, 7, 8), (6,), 100, (5, 6), STOP),
        ((5, 6, 7, 8), (), 2, (5, 6), LENGTH),
        ((5, 6, 7, 8), (6,), 2, (5, 6), STOP),
        ((5, 6, 7, 8), (7,), 2, (5, 6), LENGTH),
    ],
    ids=["whole", "wrong", "stop", "length", "both on one token", "stop behind the length"],
)
def test_commits_what_agrees_to_the_first_end(target, stops, left, committed, reason):
    verdict = judged((5, 6, 7), target, stops=stops, left=left)
    assert verdict.token_ids == committed
    assert verdict.finish_reason is reason
    assert verdict.stop_token_id == (committed[-1] if reason is STOP else None)
    assert verdict.num_accepted == (1 if target[1] == 9 else 3)
    assert len(verdict.logprobs) == len(committed)


def test_accepted_drafts_behind_a_stop_are_counted():
    verdict = judged((5, 6, 7), (5, 6, 7, 8), stops=(5,))
    assert verdict.num_accepted == 3
    counts = speculation_counts(3, verdict.num_accepted, True, False)
    assert counts.acceptance_histogram == (0, 0, 0, 1)
    assert (counts.num_wanting_steps, counts.num_hit_steps) == (1, 0)


@pytest.mark.parametrize(
    ("target", "rejected"),
    [((5, 6, 7, 8), ()), ((5, 6, 9, 8), (7,)), ((5, 9, 7, 8), (6, 7)), ((9, 6, 7, 8), (5, 6, 7))],
)
@pytest.mark.parametrize("stops", [(), (5, 9)])
def test_the_draft_tokens_that_were_not_accepted_are_told_in_their_order(target, rejected, stops):
    assert judged((5, 6, 7), target, stops=stops).rejected_token_ids == rejected


@pytest.mark.parametrize(
    ("path", "rejected"),
    [((), (5, 6, 7, 8)), ((0,), (6, 7, 8)), ((0, 3), (6, 7)), ((1, 2), (5, 8))],
)
def test_of_a_tree_everything_beside_the_accepted_path_was_rejected(path, rejected):
    tree = DraftTree(0, token_ids=(5, 6, 7, 8), parents=(ROOT, ROOT, 1, 0))
    committed = (*(tree.token_ids[index] for index in path), 9)
    verdict = apply_stop_conditions(
        Verified(committed, (), path), tree, stop_token_ids=frozenset(), num_tokens_left=100
    )
    assert verdict.rejected_token_ids == rejected
    assert verdict.num_accepted + len(rejected) == verdict.num_draft_tokens


def test_without_a_draft_nothing_is_counted_as_speculation():
    counts = speculation_counts(0, judged((), (5,)).num_accepted, False, False)
    assert counts.num_spec_steps == 0
    assert counts.acceptance_histogram == ()
