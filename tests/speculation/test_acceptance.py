from __future__ import annotations

import pytest

from outrider.speculation.acceptance import accept, accept_path


@pytest.mark.parametrize(
    ("draft", "target", "committed"),
    [
        ((), (7,), (7,)),
        ((1, 2), (1, 2, 3), (1, 2, 3)),
        ((1, 2), (1, 9, 3), (1, 9)),
        ((1, 2), (8, 2, 3), (8,)),
    ],
)
def test_the_agreeing_prefix_and_one_more_are_committed(draft, target, committed):
    assert accept(draft, target) == committed


def test_a_verification_decides_one_token_more_than_was_drafted():
    with pytest.raises(AssertionError):
        accept((1, 2), (1, 2))


@pytest.mark.parametrize(
    ("draft", "parents", "target", "path"),
    [
        ((1, 2, 3), (-1, -1, 0), (1, 3, 9, 9), (0, 2)),
        ((1, 2, 3), (-1, -1, 1), (2, 9, 3, 9), (1, 2)),
        ((1, 2, 3), (-1, -1, 0), (2, 3, 9, 9), (1,)),
        ((1, 2, 3), (-1, -1, 0), (5, 3, 9, 9), ()),
        ((1, 1, 1, 2), (-1, 0, 1, 1), (1, 1, 2, 7, 8), (0, 1, 3)),
    ],
    ids=["first", "second", "no grandchild of another", "none", "equal tokens on a path"],
)
def test_the_path_that_agrees_is_accepted(draft, parents, target, path):
    assert accept_path(draft, parents, target) == path
