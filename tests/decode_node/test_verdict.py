"""One verification: how much is committed, and what ends a sample."""

from __future__ import annotations

import pytest

from decode_node.verdict import judge
from outrider.request import FinishReason, TokenLogprobs
from outrider.speculation.acceptance import accept
from outrider.speculation.verify.base import Verified


def judged(draft, target, *, stops=(), left=100):
    token_ids = accept(draft, target)
    return judge(
        verified=Verified(token_ids, tuple(TokenLogprobs(token, -1.0, 1) for token in token_ids)),
        num_draft_tokens=len(draft),
        stop_token_ids=frozenset(stops),
        num_tokens_left=left,
    )


@pytest.mark.parametrize(
    ("draft", "target", "committed"),
    [
        ((), (5,), (5,)),
        ((5, 6, 7), (5, 6, 7, 8), (5, 6, 7, 8)),
        ((5, 6, 7), (5, 9, 7, 8), (5, 9)),
        ((5, 6, 7), (4, 6, 7, 8), (4,)),
    ],
)
def test_commits_what_agrees_and_one_token_more(draft, target, committed):
    verdict = judged(draft, target)
    assert verdict.token_ids == committed
    assert verdict.num_accepted == len(committed) - 1
    assert verdict.finish_reason is None


def test_a_stop_token_inside_the_block_ends_the_sample_there():
    verdict = judged((5, 6, 7), (5, 6, 7, 8), stops=(6,))
    assert verdict.token_ids == (5, 6)
    assert (verdict.finish_reason, verdict.stop_token_id) == (FinishReason.STOP, 6)
    assert len(verdict.logprobs) == 2


def test_accepted_drafts_behind_a_stop_are_counted():
    verdict = judged((5, 6, 7), (5, 6, 7, 8), stops=(5,))
    assert verdict.num_accepted == 3
    counts = verdict.counts(wanting=True, hit=False)
    assert counts.acceptance_histogram == (0, 0, 0, 1)
    assert (counts.num_wanting_steps, counts.num_hit_steps) == (1, 0)


def test_max_tokens_cuts_the_block():
    verdict = judged((5, 6, 7), (5, 6, 7, 8), left=2)
    assert verdict.token_ids == (5, 6)
    assert verdict.finish_reason is FinishReason.LENGTH


def test_stop_wins_over_length_on_one_token():
    verdict = judged((5, 6, 7), (5, 6, 7, 8), stops=(6,), left=2)
    assert verdict.finish_reason is FinishReason.STOP


def test_a_stop_behind_max_tokens_is_not_reached():
    verdict = judged((5, 6, 7), (5, 6, 7, 8), stops=(7,), left=2)
    assert (verdict.token_ids, verdict.finish_reason) == ((5, 6), FinishReason.LENGTH)


def test_without_a_draft_nothing_is_counted_as_speculation():
    counts = judged((), (5,)).counts(wanting=False, hit=False)
    assert counts.num_spec_steps == 0
    assert counts.acceptance_histogram == ()
