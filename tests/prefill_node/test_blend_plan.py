from __future__ import annotations

import numpy as np
import pytest

from outrider.request import Blend
from prefill_node.blend_plan import BlendPlan


def plan_of(lengths, num_tokens, *, share=0.5, block_size=4):
    return BlendPlan.of(Blend(piece_lengths=lengths, recompute_share=share), num_tokens, block_size)


def test_whole_blocks_of_all_pieces_but_the_first_are_reused():
    plan = plan_of((5, 9, 3, 8), 30)
    assert plan.reused == (range(5, 13), range(17, 25))
    assert plan.num_exact == 5
    assert (plan.num_reused, plan.num_recomputed) == (16, 8)


def test_a_piece_ends_with_the_tokens_that_are_to_be_computed():
    assert plan_of((5, 9), 12).reused == (range(5, 9),)  # the prompt's last tokens are the decode node's


@pytest.mark.parametrize("lengths", [(), (12,), (12, 3), (0, 12), (3, 1)])
def test_without_anything_to_reuse_there_is_no_plan(lengths):
    assert plan_of(lengths, 15) is None


def test_a_request_that_is_not_blended_has_no_plan():
    assert BlendPlan.of(None, 15, 4) is None


def test_the_tokens_that_deviate_most_are_computed_again():
    plan = plan_of((2, 4, 4), 12, share=0.375)
    plan.choose([np.array([0.0, 3.0, 1.0, 0.0]), np.array([0.0, 0.0, 2.0, 9.0])], 12)
    assert np.flatnonzero(plan.computed).tolist() == [0, 1, 3, 8, 9, 10, 11]
    assert list(plan.runs(0, 12)) == [range(2), range(3, 4), range(8, 12)]
    assert list(plan.runs(1, 9)) == [range(1, 2), range(3, 4), range(8, 9)]
    assert list(plan.runs(4, 8)) == []


def test_of_equal_deviations_the_earlier_token_is_computed():
    plan = plan_of((1, 4, 4), 9, share=0.25)
    plan.choose([np.ones(4), np.ones(4)], 9)
    assert np.flatnonzero(plan.computed).tolist() == [0, 1, 2]


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_none_or_all_of_the_reused_tokens_are_computed_again(share):
    plan = plan_of((1, 4, 4), 9, share=share)
    plan.choose([np.ones(4), np.zeros(4)], 9)
    assert np.flatnonzero(plan.computed).tolist() == ([0] if share == 0 else [*range(9)])
