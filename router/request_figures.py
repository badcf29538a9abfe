"""What is measured about one request: the Summary's figures, metrics, log lines and trailers."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from outrider.answer import Finished, KvTransferMetrics, RequestMetrics, SpeculationMetrics, Summary, Usage
from outrider.errors import OutriderError
from outrider.prefill import PrefillFigures
from outrider.request import Request, VerificationMethod
from outrider.service.telemetry.logging import get_logger
from outrider.service.telemetry.metrics import RouterMetrics
from outrider.session import Granted, KvReady, SpeculationCounts

TOKENS_KEY = "outrider-tokens"
TTFT_KEY = "outrider-ttft-ms"
STORE_KEY = "outrider-store"
ACCEPTANCE_LENGTH_KEY = "outrider-acceptance-length"
VERIFICATION_KEY = "outrider-verification"

Trailers = tuple[tuple[str, str], ...]

NOTHING_GENERATED: Trailers = ((TOKENS_KEY, "0"),)
"""Trailers of a call that was refused before it became a request."""

_log = get_logger("requests")


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
class RequestFigures:
    """Filled in while the request is served; times are monotonic seconds."""

    request: Request
    metrics: RouterMetrics
    arrived_at: float
    admitted_at: float | None = None
    first_token_at: float | None = None
    ended_at: float | None = None
    nodes: dict[str, str] = field(default_factory=dict)  # by name, in the order of their use: their numerics
    attempts: list[AttemptFigures] = field(default_factory=list)
    num_moves: int = 0  # times that work moved from a prefill or decode node
    speculation: SpeculationTotals = field(default_factory=SpeculationTotals)
    last_token_at: dict[int, float] = field(default_factory=dict)  # by sample
    has_moved: bool = False  # since the last token

    # ------------------------------------------------------------ what happens

    def admit(self, granted: Granted) -> None:
        """The first grant; later calls do nothing."""
        if self.admitted_at is not None:
            return
        self.admitted_at = time.monotonic()
        num_prompt_tokens, queue_seconds = len(self.request.prompt_token_ids), self._since_arrival(self.admitted_at)
        self.metrics.observe_admitted(queue_seconds=queue_seconds, num_prompt_tokens=num_prompt_tokens)
        _log.info(
            "request admitted",
            request_id=self.request.request_id,
            nodes=list(self.nodes),
            num_prompt_tokens=num_prompt_tokens,
            num_held_tokens=granted.held_prefix_length,
            seed=self.request.options.sampling.seed,
            queue_seconds=round(queue_seconds, 4),
        )

    def add_tokens(self, sample: int, num_tokens: int) -> None:
        """New tokens of a sample have come together."""
        now = time.monotonic()
        if self.first_token_at is None:
            self.first_token_at = now
            self.metrics.observe_first_token(now - self.arrived_at)
        elif self.has_moved and self.last_token_at:
            self.metrics.observe_move_gap(now - max(self.last_token_at.values()))
        self.has_moved = False
        last = self.last_token_at.get(sample)
        self.metrics.observe_tokens(num_tokens, None if last is None else now - last)
        self.last_token_at[sample] = now

    def add_move(self, cause: str, *, node: str, error: OutriderError | None, num_generated_tokens: int) -> None:
        """The next tokens come from another node than the last ones, or are computed with the help of another."""
        self.has_moved = True
        self.num_moves += 1
        self.metrics.add_move(cause)
        _log.warning(
            "work moves",
            request_id=self.request.request_id,
            cause=cause,
            node=node,
            error="" if error is None else error.message,
            num_generated_tokens=num_generated_tokens,
        )

    def mark_end(self) -> None:
        """The end of the last sample; the first call counts."""
        if self.ended_at is None:
            self.ended_at = time.monotonic()

    def finish(self, samples: Iterable[Finished], *, num_generated_tokens: int) -> Summary:
        prefills = [attempt.prefill for attempt in self.attempts if attempt.prefill is not None]
        usage = Usage(
            num_prompt_tokens=len(self.request.prompt_token_ids),
            num_cached_tokens=self._num_cached_tokens(),
            num_generated_tokens=num_generated_tokens,
        )
        metrics = RequestMetrics(
            queue_seconds=self._since_arrival(self.admitted_at),
            ttft_seconds=self._since_arrival(self.first_token_at),
            e2e_seconds=self._since_arrival(self.ended_at),
            prefill_seconds=sum(prefill.compute_seconds for prefill in prefills),
            kv_transfer=self._kv_transfer(),
            speculation=self.speculation.metrics(),
            attempts=1 + self.num_moves,
            nodes=tuple(self.nodes),
        )
        for finished in samples:
            self.metrics.observe_finished_sample(finished.reason)
        self.metrics.observe_finished_request(metrics.e2e_seconds)
        _log.info(
            "request finished",
            request_id=self.request.request_id,
            nodes=metrics.nodes,
            attempts=metrics.attempts,
            num_generated_tokens=usage.num_generated_tokens,
            num_cached_tokens=usage.num_cached_tokens,
            ttft_seconds=round(metrics.ttft_seconds, 4),
            e2e_seconds=round(metrics.e2e_seconds, 4),
        )
        return Summary(request_id=self.request.request_id, usage=usage, metrics=metrics)

    def close(self, failure: OutriderError | None) -> None:
        """The request has ended, however it did."""
        if len({numerics for numerics in self.nodes.values() if numerics}) > 1:
            self.metrics.add_mixed_numerics()
        if failure is not None:
            self.metrics.add_failures(failure.reason, 1)
            _log.warning(
                "request failed", request_id=self.request.request_id, error=failure.message, reason=failure.reason
            )

    # ------------------------------------------------------------ what it comes to

    def trailers(self, *, num_generated_tokens: int, is_kept: bool) -> Trailers:
        """A figure that was never measured is left out, not zero.

        `is_kept`: False for a resumable request that the store does not have.
        """
        trailers = [(TOKENS_KEY, str(num_generated_tokens))]
        if self.first_token_at is not None:
            trailers.append((TTFT_KEY, f"{self._since_arrival(self.first_token_at) * 1e3:.1f}"))
        if self.speculation.num_draft_tokens:
            trailers.append((ACCEPTANCE_LENGTH_KEY, f"{self.speculation.metrics().mean_acceptance_length:.2f}"))
        if self.request.options.verification_method is not VerificationMethod.COUPLED:
            trailers.append((VERIFICATION_KEY, self.request.options.verification_method.label))
        if not is_kept:
            trailers.append((STORE_KEY, "lost"))
        return tuple(trailers)

    def _since_arrival(self, at: float | None) -> float:
        """0 for what never happened."""
        return 0.0 if at is None else max(at - self.arrived_at, 0.0)

    def _num_cached_tokens(self) -> int:
        """Prompt tokens that were not computed by an attempt that completed the prompt; a lost node may have."""
        num_prompt_tokens = len(self.request.prompt_token_ids)
        found = [
            max(min(attempt.num_known_tokens - attempt.num_computed_tokens, num_prompt_tokens), 0)
            for attempt in self.attempts
            if attempt.num_computed_tokens is not None
        ]
        return min(found, default=0)

    def _kv_transfer(self) -> KvTransferMetrics:
        total = KvTransferMetrics()
        for attempt in self.attempts:
            ready, prefill = attempt.kv_ready, attempt.prefill
            if ready is None or not ready.connector:
                continue
            seconds = ready.transfer_seconds if prefill is None else prefill.transfer_seconds
            exposed = 0.0 if prefill is None else prefill.exposed_seconds
            total = KvTransferMetrics(
                connector=total.connector or ready.connector,
                bytes=total.bytes + ready.kv_bytes,
                seconds=total.seconds + seconds,
                exposed_seconds=total.exposed_seconds + min(exposed, seconds),
            )
        return total
