"""A part of a test's parameter matrix that leaves out no pair of values."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence


def cover_pairs(cases: Sequence[Mapping[str, Hashable]]) -> set[int]:
    """Returns the indices of cases that together have every pair of values that any case has.

    A case maps the name of each parameter to a value. Cases with one parameter are all chosen. The choice is greedy, so
    it is not always the smallest one. Of equal cases, it takes that whose pairs were chosen least, so that with three
    parameters the values of any two are spread over those of the third.
    """
    pairs_of = [set(itertools.combinations(sorted(case.items()), min(2, len(case)))) for case in cases]
    uncovered = set().union(*pairs_of)
    chosen: set[int] = set()
    times_chosen = Counter[Hashable]()

    def worth(index: int) -> tuple[int, int]:
        pairs = pairs_of[index]
        return len(pairs & uncovered), -sum(times_chosen[pair] for pair in pairs)

    while uncovered:
        best = max(range(len(cases)), key=worth)  # the first of equals
        chosen.add(best)
        uncovered -= pairs_of[best]
        times_chosen.update(pairs_of[best])
    return chosen
