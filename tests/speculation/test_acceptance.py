from __future__ import annotations

import pytest

from outrider.speculation.verify.coupled import accept_path


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
