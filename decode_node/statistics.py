"""What the engine thread tells about its steps: it neither logs nor counts in metrics itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from outrider.request import VerificationMethod
from outrider.service.telemetry.recent_sum import RecentSum
from outrider.session import SpeculationCounts


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
    preempted_groups: Sequence[tuple[int, bytes]] = ()  # of each such sequence: session and sequence group
    num_drafts_by_method: Mapping[VerificationMethod, int] = field(default_factory=dict)
    num_draft_tokens_by_source: Mapping[str, int] = field(default_factory=dict)
    num_accepted_by_source: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixLookups:
    """Totals over granted groups."""

    num_query_tokens: int = 0
    num_hit_tokens: int = 0


class RecentRates:
    """What the node reports of its last ten seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._tokens, self._drafts, self._accepted = RecentSum(clock), RecentSum(clock), RecentSum(clock)
        self._wanting_steps, self._hit_steps = RecentSum(clock), RecentSum(clock)
        self._kv_bytes = RecentSum(clock)
        self.add_kv_bytes = self._kv_bytes.add  # of a hand-off that is complete
        self.tokens_per_second = self._tokens.per_second
        self.kv_bytes_per_second = self._kv_bytes.per_second

    def add(self, stats: StepStats) -> None:
        self._tokens.add(stats.num_generated_tokens)
        self._drafts.add(stats.num_drafts)
        self._accepted.add(stats.num_accepted_draft_tokens)

    def add_speculation(self, counts: SpeculationCounts) -> None:
        self._wanting_steps.add(counts.num_wanting_steps)
        self._hit_steps.add(counts.num_hit_steps)

    def mean_acceptance_length(self) -> float:
        """1 + accepted draft tokens for each draft; 0 where nothing was drafted."""
        num_drafts = self._drafts.total()
        return 1.0 + self._accepted.total() / num_drafts if num_drafts else 0.0

    def look_ahead_hit_rate(self) -> float:
        """Of the steps that wanted a draft node's proposals; 0 where none did."""
        num_wanting = self._wanting_steps.total()
        return self._hit_steps.total() / num_wanting if num_wanting else 0.0
