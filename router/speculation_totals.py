"""What drafts have come to, over all of a request."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.answer import SpeculationMetrics
from outrider.session import SpeculationCounts


@dataclass(slots=True)
class SpeculationTotals:
    """Sums of what decode nodes report with their tokens. One addition for every token: kept cheap."""

    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_wanting_steps: int = 0
    num_hit_steps: int = 0
    acceptance_histogram: list[int] = field(default_factory=list)

    def add(self, counts: SpeculationCounts) -> None:
        if not counts.num_wanting_steps and not counts.num_spec_steps:
            return
        self.num_spec_steps += counts.num_spec_steps
        self.num_draft_tokens += counts.num_draft_tokens
        self.num_accepted_draft_tokens += counts.num_accepted_draft_tokens
        self.num_wanting_steps += counts.num_wanting_steps
        self.num_hit_steps += counts.num_hit_steps
        histogram, added = self.acceptance_histogram, counts.acceptance_histogram
        histogram.extend([0] * (len(added) - len(histogram)))
        for num_accepted, num_steps in enumerate(added):
            histogram[num_accepted] += num_steps

    def metrics(self) -> SpeculationMetrics:
        """All zero when nothing was drafted."""
        if self.num_draft_tokens == 0:
            return SpeculationMetrics()
        return SpeculationMetrics(
            num_spec_steps=self.num_spec_steps,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_draft_tokens=self.num_accepted_draft_tokens,
            draft_acceptance_rate=self.num_accepted_draft_tokens / self.num_draft_tokens,
            mean_acceptance_length=1.0 + self.num_accepted_draft_tokens / max(self.num_spec_steps, 1),
            acceptance_histogram=tuple(self.acceptance_histogram),
            look_ahead_hit_rate=self.num_hit_steps / self.num_wanting_steps if self.num_wanting_steps else 0.0,
        )
