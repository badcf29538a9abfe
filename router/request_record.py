"""What is measured about one request: the Summary's figures."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from outrider.answer import KvTransferMetrics, RequestMetrics, SpeculationMetrics, Summary, Usage
from outrider.prefill import PrefillFigures
from outrider.request import Request
from outrider.session import KvReady, SpeculationCounts


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


@dataclass(slots=True)
class AttemptFigures:
    """What nodes said of one attempt's prompt."""

    num_known_tokens: int  # prompt and generated tokens that it started from
    num_tokens_to_compute: int | None = None  # by the decode node; None: nothing was granted
    kv_ready: KvReady | None = None
    prefill: PrefillFigures | None = None  # of the transfer that filled the reservation
    has_tokens: bool = False

    @property
    def num_computed_tokens(self) -> int | None:
        """Known tokens for which a node ran a forward pass; None unless the prompt was completed."""
        if self.num_tokens_to_compute is None or not (self.kv_ready is not None or self.has_tokens):
            return None
        return self.num_tokens_to_compute + (0 if self.prefill is None else self.prefill.num_computed_tokens)


@dataclass(slots=True)
class RequestRecord:
    """Filled in while the request is served; times are monotonic seconds of this machine."""

    request: Request
    arrived_at: float
    clock: Callable[[], float] = time.monotonic
    admitted_at: float | None = None
    first_token_at: float | None = None
    ended_at: float | None = None
    nodes: dict[str, str] = field(default_factory=dict)  # by name, in the order of their use: their numerics
    attempts: list[AttemptFigures] = field(default_factory=list)
    num_moves: int = 0  # times that work moved from a prefill or decode node
    speculation: SpeculationTotals = field(default_factory=SpeculationTotals)

    def use_node(self, name: str, numerics: str) -> None:
        self.nodes[name] = numerics

    @property
    def has_mixed_numerics(self) -> bool:
        """Whether nodes that compute differently have worked on this answer."""
        return len({numerics for numerics in self.nodes.values() if numerics}) > 1

    def mark_admitted(self) -> None:
        """The first grant; later calls do nothing."""
        if self.admitted_at is None:
            self.admitted_at = self.clock()

    def mark_end(self) -> None:
        """The end of the last sample; the first call counts."""
        if self.ended_at is None:
            self.ended_at = self.clock()

    @property
    def queue_seconds(self) -> float:
        return self._since_arrival(self.admitted_at)

    @property
    def ttft_seconds(self) -> float:
        """0 before the first token."""
        return self._since_arrival(self.first_token_at)

    def summary(self, *, num_generated_tokens: int) -> Summary:
        prefills = [attempt.prefill for attempt in self.attempts if attempt.prefill is not None]
        return Summary(
            request_id=self.request.request_id,
            usage=Usage(
                num_prompt_tokens=len(self.request.prompt_token_ids),
                num_cached_tokens=self._num_cached_tokens(),
                num_generated_tokens=num_generated_tokens,
            ),
            metrics=RequestMetrics(
                queue_seconds=self.queue_seconds,
                ttft_seconds=self.ttft_seconds,
                e2e_seconds=self._since_arrival(self.ended_at),
                prefill_seconds=sum(prefill.compute_seconds for prefill in prefills),
                kv_transfer=self._kv_transfer(),
                speculation=self.speculation.metrics(),
                attempts=1 + self.num_moves,
                nodes=tuple(self.nodes),
            ),
        )

    def _since_arrival(self, at: float | None) -> float:
        """0 for what never happened."""
        return 0.0 if at is None else max(at - self.arrived_at, 0.0)

    def _num_cached_tokens(self) -> int:
        """Prompt tokens for which no node ran a forward pass, in any attempt that completed the prompt."""
        num_prompt_tokens = len(self.request.prompt_token_ids)
        found = [
            max(min(attempt.num_known_tokens - attempt.num_computed_tokens, num_prompt_tokens), 0)
            for attempt in self.attempts
            if attempt.num_computed_tokens is not None
        ]
        return min(found, default=0)

    def _kv_transfer(self) -> KvTransferMetrics:
        moved = [attempt for attempt in self.attempts if attempt.kv_ready is not None and attempt.kv_ready.connector]
        total = KvTransferMetrics()
        for attempt in moved:
            ready, prefill = attempt.kv_ready, attempt.prefill
            assert ready is not None, "filtered above"
            seconds = ready.transfer_seconds if prefill is None else prefill.transfer_seconds
            exposed = 0.0 if prefill is None else prefill.exposed_seconds
            total = KvTransferMetrics(
                connector=total.connector or ready.connector,
                bytes=total.bytes + ready.kv_bytes,
                seconds=total.seconds + seconds,
                exposed_seconds=total.exposed_seconds + min(exposed, seconds),
            )
        return total
