"""The expected speedup of speculation over plain decoding, from acceptance, times and hit rate.

A verification of k draft tokens, each accepted with probability a if those before it are, commits
E = (1 - a^(k+1)) / (1 - a) tokens on average (Leviathan et al. 2022). If further rows take time, steps with drafts
take longer than plain ones, and have their own duration in the model.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedModel:
    acceptance: float  # a: probability that a draft token is accepted if those before it are
    num_draft_tokens: float  # k: draft tokens verified in a step
    step_seconds: float  # duration of the target's plain step
    token_seconds: float  # the drafter's time for one draft token
    verify_seconds: float = 0.0  # duration of the target's step with drafts; 0: equal to `step_seconds`

    @property
    def tokens_per_verification(self) -> float:
        """E: the expected number of tokens that a verification commits."""
        return expected_tokens(self.acceptance, self.num_draft_tokens)

    def colocated(self, drafted_share: float = 1.0) -> float:
        """Returns the speedup if the target waits for the drafter. Steps without a draft are plain."""
        drafted_seconds = self._verify_seconds + self.num_draft_tokens * self.token_seconds
        seconds = drafted_share * drafted_seconds + (1.0 - drafted_share) * self.step_seconds
        return (drafted_share * self.tokens_per_verification + 1.0 - drafted_share) * self.step_seconds / seconds

    def ahead(self, hit_rate: float) -> float:
        """Returns the speedup if the drafter drafts while the target verifies. Steps without a hit are plain."""
        step_seconds = hit_rate * self._verify_seconds + (1.0 - hit_rate) * self.step_seconds
        seconds = max(step_seconds, (self.num_draft_tokens + 1) * self.token_seconds)
        return (hit_rate * self.tokens_per_verification + 1.0 - hit_rate) * self.step_seconds / seconds

    @property
    def _verify_seconds(self) -> float:
        return self.verify_seconds or self.step_seconds


def expected_tokens(acceptance: float, num_draft_tokens: float) -> float:
    """Returns E, the expected number of tokens that a verification commits."""
    if acceptance >= 1.0:
        return num_draft_tokens + 1.0
    return float((1.0 - acceptance ** (num_draft_tokens + 1)) / (1.0 - acceptance))


def acceptance_of(tokens_per_verification: float, num_draft_tokens: float) -> float:
    """Returns the acceptance that yields this many tokens per verification: the inverse of `expected_tokens`."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2.0
        too_many = expected_tokens(middle, num_draft_tokens) > tokens_per_verification
        low, high = (low, middle) if too_many else (middle, high)
    return (low + high) / 2.0
