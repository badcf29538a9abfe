from __future__ import annotations

import pytest

from outrider.speculation.acceptance import accept


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
