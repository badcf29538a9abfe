"""How likely the target accepts a draft model's tokens for one sequence: running estimates."""

from __future__ import annotations

from dataclasses import dataclass, field

PRIOR_ACCEPTANCE = 0.7
PRIOR_TOKENS = 4.0
"""Weight of that prior, in decisions."""

PRIOR_RUNNERS_UP = (0.5, 0.2, 0.1)
"""Chance of each runner-up where the winner was wrong, until it has been seen. Simulated at temperature 1 with 32k
ids, the best one, two and four of a coupled race hold the target's token in .84, .95 and .99 of all positions."""

PRIOR_MISSES = 4.0
"""Weight of that prior, in rejected tokens."""

NUM_RUNNERS_UP = len(PRIOR_RUNNERS_UP)

FORGETTING = 0.97
"""Weight that an older decision keeps at each new one: texts change."""


@dataclass(slots=True)
class PathEstimates:
    """Of one sequence. Each position that a path had guessed counts once."""

    _num_decided: float = 0.0
    _num_accepted: float = 0.0
    _num_missed: float = 0.0
    _num_by_rank: list[float] = field(default_factory=lambda: [0.0] * NUM_RUNNERS_UP)

    @property
    def acceptance(self) -> float:
        """Probability that the target accepts a draft token after accepting those before it."""
        return (self._num_accepted + PRIOR_TOKENS * PRIOR_ACCEPTANCE) / (self._num_decided + PRIOR_TOKENS)

    def runner_up_chance(self, rank: int) -> float:
        """Probability that the target chooses the runner-up of this rank, from 0, where it rejects the draft token."""
        prior = PRIOR_MISSES * PRIOR_RUNNERS_UP[rank]
        return (self._num_by_rank[rank] + prior) / (self._num_missed + PRIOR_MISSES)

    def tokens_won(self, num_tokens: int) -> float:
        """Expected accepted tokens of a draft of this length."""
        acceptance = self.acceptance
        return float(acceptance * (1.0 - acceptance**num_tokens) / (1.0 - acceptance))

    def observe_accepted(self) -> None:
        """The target accepted the draft token."""
        self._num_decided = FORGETTING * self._num_decided + 1.0
        self._num_accepted = FORGETTING * self._num_accepted + 1.0

    def observe_missed(self, rank: int | None) -> None:
        """It chose the runner-up of this rank instead; None: another token."""
        self._num_decided = FORGETTING * self._num_decided + 1.0
        self._num_accepted *= FORGETTING
        self._num_missed = FORGETTING * self._num_missed + 1.0
        self._num_by_rank = [FORGETTING * count for count in self._num_by_rank]
        if rank is not None:
            self._num_by_rank[rank] += 1.0
