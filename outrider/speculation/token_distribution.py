"""The distribution that a draft token was drawn from, for verification by comparing probabilities. Torch-free."""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_DISTRIBUTION_IDS = 32
"""Maximum number of ids in a distribution. A drafter draws only from its most likely tokens."""


@dataclass(frozen=True, slots=True)
class TokenDistribution:
    """Token ids and their probabilities. `probability_of` divides the stored values by their sum."""

    token_ids: tuple[int, ...]  # without duplicates
    probabilities: tuple[float, ...]  # one for each id, float32

    @property
    def total(self) -> float:
        return math.fsum(self.probabilities)

    def probability_of(self, token_id: int) -> float:
        """Returns the probability of an id, 0 if it is absent."""
        for candidate, probability in zip(self.token_ids, self.probabilities, strict=True):
            if candidate == token_id:
                return probability / self.total
        return 0.0

    def can_have_drawn(self, token_id: int) -> bool:
        """Returns whether this distribution, received from a peer, is valid and may have yielded the token."""
        return (
            len(self.token_ids) == len(self.probabilities) <= MAX_DISTRIBUTION_IDS
            and len(set(self.token_ids)) == len(self.token_ids)
            and all(0.0 <= probability <= 1.0 for probability in self.probabilities)
            and abs(self.total - 1.0) < 1e-3  # so the total is not 0 and can be a divisor
            and self.probability_of(token_id) > 0.0
        )


def certain(token_id: int) -> TokenDistribution:
    """Returns the distribution of a drafter that does not draw: the token has probability 1."""
    return TokenDistribution((token_id,), (1.0,))
