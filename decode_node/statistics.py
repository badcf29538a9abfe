"""What the engine thread tells about its steps: it neither logs nor counts in metrics itself."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from outrider.request import VerificationMethod

RATE_WINDOW_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """One step, in seconds and counts."""

    seconds: float
    nanoseconds: Mapping[str, int]  # by outrider.profile.Part, since the end of the step before
    num_rows: int
    num_sequences: int
    num_generated_tokens: int
    num_preempted: int
    num_drafts: int  # verifications with a draft
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    num_drafts_by_method: Mapping[VerificationMethod, int] = field(default_factory=dict)
    num_draft_tokens_by_source: Mapping[str, int] = field(default_factory=dict)
    num_accepted_by_source: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixLookups:
    """Totals over granted groups."""

    num_query_tokens: int = 0
    num_hit_tokens: int = 0


@dataclass(slots=True)
class RecentRates:
    """Tokens a second and acceptance over the last ten seconds. One owner: the event loop."""

    clock: Callable[[], float] = time.monotonic
    _steps: deque[tuple[float, StepStats]] = field(default_factory=deque)
    # Sums over these steps, so that asking does not go through all of them.
    _num_generated_tokens: int = 0
    _num_drafts: int = 0
    _num_accepted: int = 0

    def add(self, stats: StepStats) -> None:
        self._steps.append((self.clock(), stats))
        self._count(stats, 1)
        self._forget_old()

    def tokens_per_second(self) -> float:
        self._forget_old()
        return self._num_generated_tokens / RATE_WINDOW_SECONDS

    def mean_acceptance_length(self) -> float:
        """1 + accepted draft tokens for each draft; 0 where nothing was drafted."""
        self._forget_old()
        return 1.0 + self._num_accepted / self._num_drafts if self._num_drafts else 0.0

    def _count(self, stats: StepStats, sign: int) -> None:
        self._num_generated_tokens += sign * stats.num_generated_tokens
        self._num_drafts += sign * stats.num_drafts
        self._num_accepted += sign * stats.num_accepted_draft_tokens

    def _forget_old(self) -> None:
        oldest = self.clock() - RATE_WINDOW_SECONDS
        while self._steps and self._steps[0][0] < oldest:
            self._count(self._steps.popleft()[1], -1)
