"""What a draft token was drawn from, for verification methods that compare probabilities. Torch-free."""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_DISTRIBUTION_IDS = 32
"""Ids that a distribution has at most: a drafter draws from its most likely tokens only."""


@dataclass(frozen=True, slots=True)
class TokenDistribution:
    """Ids and their probabilities. The weights are taken as they are, and divided by their sum."""

    token_ids: tuple[int, ...]  # each once
    probabilities: tuple[float, ...]  # of each, float32

    @property
    def total(self) -> float:
        return math.fsum(self.probabilities)

    def probability_of(self, token_id: int) -> float:
        """0 for an id that it does not have."""
        for candidate, probability in zip(self.token_ids, self.probabilities, strict=True):
            if candidate == token_id:
                return probability / self.total
        return 0.0

    def can_have_drawn(self, token_id: int) -> bool:
        """Whether it is a distribution at all, and the token one of its own. For what a peer has sent."""
        return (
            len(self.token_ids) == len(self.probabilities) <= MAX_DISTRIBUTION_IDS
            and len(set(self.token_ids)) == len(self.token_ids)
            and all(0.0 <= probability <= 1.0 for probability in self.probabilities)
            and abs(self.total - 1.0) < 1e-3  # so it is not 0, and may be divided by
            and self.probability_of(token_id) > 0.0
        )


def certain(token_id: int) -> TokenDistribution:
    """Of a drafter that does not draw: the token has probability 1."""
    return TokenDistribution((token_id,), (1.0,))
