"""What speculation is expected to win, from acceptance, times and hit rate; plain decoding is 1.

A verification of k draft tokens, each accepted with probability a after right ones, commits E = (1 - a^(k+1)) / (1 - a)
tokens on average (Leviathan et al. 2022). Steps are taken to cost the same for any number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedModel:
    acceptance: float  # of a draft token after right ones
    num_draft_tokens: int  # verified in a step: k
    step_seconds: float  # of the target
    token_seconds: float  # of the drafter

    @property
    def tokens_per_verification(self) -> float:
        """E."""
        if self.acceptance >= 1.0:
            return self.num_draft_tokens + 1.0
        return float((1.0 - self.acceptance ** (self.num_draft_tokens + 1)) / (1.0 - self.acceptance))

    def colocated(self) -> float:
        """The drafter drafts, then the target verifies."""
        seconds = self.step_seconds + self.num_draft_tokens * self.token_seconds
        return self.tokens_per_verification * self.step_seconds / seconds

    def ahead(self, hit_rate: float) -> float:
        """The drafter drafts while the target verifies. A step without a hit is a plain one."""
        seconds = max(self.step_seconds, (self.num_draft_tokens + 1) * self.token_seconds)
        return (hit_rate * self.tokens_per_verification + 1.0 - hit_rate) * self.step_seconds / seconds
