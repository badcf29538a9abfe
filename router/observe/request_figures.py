"""What is measured about one request: the Summary's figures, metrics, log lines and trailers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from opentelemetry import trace

from outrider.answer import Finished, KvTransferMetrics, RequestMetrics, Summary, Usage
from outrider.errors import OutriderError
from outrider.node_stamp import NODES_KEY, stamps_to_text
from outrider.prefill import PrefillFigures, TimedPart
from outrider.request import FinishReason, Request, VerificationMethod
from outrider.service.telemetry.logging import get_logger
from outrider.service.telemetry.metrics import RouterMetrics
from outrider.service.telemetry.tracing import fail
from outrider.session import NO_SPECULATION, Granted, KvReady, SampleTokens
from router.nodes.link import NodeLink, PrefillLink
from router.observe.timeline import RequestState, Span, SpanKind, Timeline

TOKENS_KEY = "outrider-tokens"
TTFT_KEY = "outrider-ttft-ms"
STORE_KEY = "outrider-store"
ACCEPTANCE_LENGTH_KEY = "outrider-acceptance-length"
VERIFICATION_KEY = "outrider-verification"

Trailers = tuple[tuple[str, str], ...]

CLIENT_LEFT = "CLIENT_LEFT"
"""Among the reasons of failed requests: its client had left before the answer was whole. The client is told nothing."""
NOTHING_GENERATED: Trailers = ((TOKENS_KEY, "0"),)
"""Trailers of a call that was refused before it became a request."""

_log = get_logger("requests")


@dataclass(slots=True)
class AttemptFigures:
    """What nodes say of one attempt, for its request's figures and timeline."""

    request: RequestFigures
    decode: NodeLink
    num_known_tokens: int  # prompt and generated tokens that it started from
    index: int  # of the request's attempts
    traced: trace.Span  # the attempt, in the request's trace
    num_tokens_to_compute: int | None = None  # by the decode node; None: nothing was granted
    kv_ready: KvReady | None = None
    prefill: PrefillFigures | None = None  # of the transfer that filled the reservation
    has_tokens: bool = False
    num_new_tokens: int = 0
    decoding: Span | None = None

    @property
    def num_computed_tokens(self) -> int | None:
        """Known tokens for which a node ran a forward pass; None unless the prompt was completed."""
        if self.num_tokens_to_compute is None or not (self.kv_ready is not None or self.has_tokens):
            return None
        return self.num_tokens_to_compute + (0 if self.prefill is None else self.prefill.num_computed_tokens)

    @property
    def timeline(self) -> Timeline:
        return self.request.timeline

    def ask(self, detail: str) -> Span:
        """The decode node is asked for room; the span is closed with its answer, or with the attempt."""
        return self._begin(SpanKind.OPEN, self.decode, detail)

    def take_grant(self, granted: Granted) -> None:
        if self.num_tokens_to_compute is None:
            self.request.attempts.append(self)
        self.num_tokens_to_compute = granted.num_tokens_to_compute
        self.timeline.add_node(self.decode.stamp)
        self.request.admit(granted)
        if not granted.kv_address:
            self._begin_decoding(f"the node computes {granted.num_tokens_to_compute} known tokens itself")

    def begin_prefill(self, link: PrefillLink) -> Span:
        """A prefill node is asked for KV."""
        self.timeline.add_node(link.stamp)
        span = self._begin(SpanKind.PREFILL, link)
        self.timeline.show(span, self.traced, trace.SpanKind.CLIENT)
        span.traced.set_attribute("outrider.prefill_node", link.name)
        return span

    def end_prefill(self, span: Span, call: asyncio.Task[PrefillFigures]) -> None:
        """`span`: of the call, which has ended."""
        error = None if call.cancelled() else call.exception()
        if call.cancelled() or error is not None:
            fail(span.traced, "PREFILL_FAILED")
            span.close("given up" if error is None else str(error))
        else:
            self._place(span, call.result())

    def take_ready(self, ready: KvReady) -> None:
        """The reservation is filled."""
        self.kv_ready = ready
        now = time.monotonic()
        start = max(now - ready.transfer_seconds, self.timeline.arrived_at)
        self.timeline.add_span(
            Span(
                SpanKind.KV_TRANSFER,
                start,
                self.index,
                self.decode.name,
                end=now,
                num_bytes=ready.kv_bytes,
                detail=ready.connector,
            )
        )
        self._begin_decoding()

    def take_tokens(self, tokens: SampleTokens, num_new: int) -> None:
        """`num_new`: those that the answer did not have."""
        self.has_tokens = True
        now, timeline, report = time.monotonic(), self.timeline, self.decode.report
        if tokens.speculation is not NO_SPECULATION:
            timeline.speculation.add(tokens.speculation)
        if num_new:
            self.num_new_tokens += num_new
            self.request.add_tokens(tokens.sample, num_new, now)
        batch = 0 if report is None else report.load.num_running
        timeline.add_step(tokens, at=now, attempt=self.index, batch=batch)

    def end(self, why: str) -> None:
        """The attempt has left its decode node. `why`: empty where it has done its work. Idempotent."""
        if self.decoding is not None and self.decoding.end is None:
            self.decoding.num_tokens = self.num_new_tokens
        for span in self.timeline.spans:
            if span.attempt == self.index and span.kind in (SpanKind.OPEN, SpanKind.DECODE):
                span.close(why)

    def _begin(self, kind: SpanKind, link: NodeLink, detail: str = "") -> Span:
        return self.timeline.begin(kind, node=link.name, attempt=self.index, detail=detail)

    def _begin_decoding(self, detail: str = "") -> None:
        if self.decoding is None:
            self.decoding = self._begin(SpanKind.DECODE, self.decode, detail)

    def _place(self, span: Span, figures: PrefillFigures) -> None:
        """What the prefill node did within its call."""
        ended_at = time.monotonic()
        span.num_tokens, span.num_bytes = figures.num_computed_tokens, figures.kv_bytes
        span.close(f"{figures.num_cached_tokens} tokens cached, {figures.num_read_tokens} read")
        offset = max(ended_at - span.start - figures.call_seconds, 0.0) / 2  # the way there, if both are as long

        def add(kind: SpanKind, part: TimedPart) -> Span:
            start = min(span.start + offset + part.start_seconds, ended_at)
            end = min(span.start + offset + part.end_seconds, ended_at)
            return self.timeline.add_span(Span(kind, start, span.attempt, span.node, end=max(start, end)))

        for chunk in figures.chunks:
            add(SpanKind.PREFILL_CHUNK, chunk).num_tokens = chunk.amount
        for pushed in figures.pushed:
            add(SpanKind.KV_FRAME, pushed).num_bytes = pushed.amount


@dataclass(slots=True)
class RequestFigures:
    """Filled in while the request is served, as its timeline is; times are monotonic seconds."""

    request: Request
    metrics: RouterMetrics
    timeline: Timeline
    attempts: list[AttemptFigures] = field(default_factory=list)  # that were granted: nodes may refuse without end
    last_token_at: dict[int, float] = field(default_factory=dict)  # by sample
    has_moved: bool = False  # since the last token

    # ------------------------------------------------------------ what happens

    def begin_attempt(self, decode: NodeLink, *, num_known_tokens: int) -> AttemptFigures:
        """`num_known_tokens`: of the prompt, and generated."""
        index = len(self.timeline.attempts)
        return AttemptFigures(self, decode, num_known_tokens, index, self.timeline.begin_attempt(decode.name))

    def admit(self, granted: Granted) -> None:
        """The first grant; later calls do nothing."""
        timeline = self.timeline
        if timeline.admitted_at is not None:
            return
        timeline.admitted_at = time.monotonic()
        num_prompt_tokens, queue_seconds = len(self.request.prompt_token_ids), self._since_arrival(timeline.admitted_at)
        self.metrics.observe_admitted(queue_seconds=queue_seconds, num_prompt_tokens=num_prompt_tokens)
        _log.info(
            "request admitted",
            request_id=self.request.request_id,
            nodes=list(timeline.nodes),
            num_prompt_tokens=num_prompt_tokens,
            num_held_tokens=granted.held_prefix_length,
            seed=self.request.options.sampling.seed,
            queue_seconds=round(queue_seconds, 4),
        )

    def add_tokens(self, sample: int, num_tokens: int, now: float) -> None:
        """New tokens of a sample have come together."""
        timeline = self.timeline
        timeline.num_generated_tokens += num_tokens
        if timeline.first_token_at is None:
            timeline.first_token_at = now
            self.metrics.observe_first_token(now - timeline.arrived_at)
        elif self.has_moved and self.last_token_at:
            self.metrics.observe_move_gap(now - max(self.last_token_at.values()))
        self.has_moved = False
        last = self.last_token_at.get(sample)
        self.metrics.observe_tokens(num_tokens, None if last is None else now - last)
        self.last_token_at[sample] = now

    def add_move(self, cause: str, *, node: str, error: OutriderError | None, num_generated_tokens: int) -> None:
        """The next tokens come from another node than the last ones, or are computed with the help of another."""
        self.has_moved = True
        message = "" if error is None else error.message
        self.timeline.add_move(cause, node=node, error=message)
        self.metrics.add_move(cause)
        _log.warning(
            "work moves",
            request_id=self.request.request_id,
            cause=cause,
            node=node,
            error=message,
            num_generated_tokens=num_generated_tokens,
        )

    def mark_end(self) -> None:
        """The end of the last sample; the first call counts."""
        if self.timeline.ended_at is None:
            self.timeline.ended_at = time.monotonic()

    def finish(self, samples: Iterable[Finished], *, num_generated_tokens: int, num_longest: int) -> Summary:
        """`num_longest`: tokens of the longest sample."""
        timeline = self.timeline
        prefills = [attempt.prefill for attempt in self.attempts if attempt.prefill is not None]
        usage = Usage(
            num_prompt_tokens=len(self.request.prompt_token_ids),
            num_cached_tokens=self._num_cached_tokens(),
            num_generated_tokens=num_generated_tokens,
        )
        metrics = RequestMetrics(
            queue_seconds=self._since_arrival(timeline.admitted_at),
            ttft_seconds=self._since_arrival(timeline.first_token_at),
            e2e_seconds=self._since_arrival(timeline.ended_at),
            prefill_seconds=sum(prefill.compute_seconds for prefill in prefills),
            kv_transfer=self._kv_transfer(),
            speculation=timeline.speculation.metrics(),
            attempts=1 + timeline.num_moves,
            nodes=timeline.nodes,
        )
        timeline.num_cached_tokens = usage.num_cached_tokens
        timeline.num_generated_tokens = usage.num_generated_tokens  # with those of a router that is gone
        timeline.outcome = RequestState.FINISHED
        for finished in samples:
            self.metrics.observe_finished_sample(finished.reason)
            timeline.finish_reasons.append(finished.reason.name.lower())
            if finished.reason is FinishReason.ABORTED:
                timeline.outcome = RequestState.ABORTED
        summary = Summary(request_id=self.request.request_id, usage=usage, metrics=metrics)
        self.metrics.observe_finished_request(summary, num_longest=num_longest)
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
        return summary

    def close(self, failure: OutriderError | None) -> None:
        """The request has ended, however it did; without a failure and a summary its client has left."""
        if len({stamp.numerics for stamp in self.timeline.stamps if stamp.numerics}) > 1:
            self.metrics.add_mixed_numerics()
        if failure is None and self.timeline.outcome is None:
            self.metrics.add_failures(CLIENT_LEFT, 1)
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
        timeline = self.timeline
        trailers = [(TOKENS_KEY, str(num_generated_tokens))]
        if timeline.first_token_at is not None:
            trailers.append((TTFT_KEY, f"{self._since_arrival(timeline.first_token_at) * 1e3:.1f}"))
        if timeline.speculation.num_draft_tokens:
            trailers.append((ACCEPTANCE_LENGTH_KEY, f"{timeline.speculation.metrics().mean_acceptance_length:.2f}"))
        if self.request.options.verification_method is not VerificationMethod.COUPLED:
            trailers.append((VERIFICATION_KEY, self.request.options.verification_method.label))
        if timeline.stamps:
            trailers.append((NODES_KEY, stamps_to_text(timeline.stamps)))
        if not is_kept:
            trailers.append((STORE_KEY, "lost"))
        return tuple(trailers)

    def _since_arrival(self, at: float | None) -> float:
        """0 for what never happened."""
        return 0.0 if at is None else max(at - self.timeline.arrived_at, 0.0)

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
