"""The record of a request (ADR 36): bounded, and written while the request is served.

Every public view of the request derives from it: metrics and log lines, which are made here at each event; the
Summary, trailers and trace (`records.py`); the JSON of the router's page; and the receipt.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from opentelemetry import trace

from outrider.errors import InternalError, InvalidRequestError, OutriderError
from outrider.node_stamp import NodeVersion
from outrider.prefill import PrefillFigures
from outrider.request import Request, VerificationMethod
from outrider.service.telemetry.logging import get_logger
from outrider.service.telemetry.metrics import RouterMetrics
from outrider.service.telemetry.tracing import Tracer, fail
from outrider.session import NO_SPECULATION, Granted, KvReady, SampleTokens
from router.nodes.link import NodeLink, PrefillLink
from router.observe.spans import (
    MAX_DETAIL_CHARS,
    MAX_REJECTED,
    MAX_REQUEST_MOVES,
    MAX_REQUEST_SPANS,
    MAX_REQUEST_STEPS,
    MAX_TRACED,
    TOKENS_PER_EXTRA_STEP,
    Move,
    RequestState,
    Span,
    SpanKind,
    SpeculationTotals,
    Step,
    prefill_spans,
    request_attributes,
)

CLIENT_LEFT = "CLIENT_LEFT"
"""The failure reason that metrics show for a request whose client left before the answer was complete."""
_log = get_logger("requests")


@dataclass(slots=True, eq=False)
class AttemptRecord:
    """What the nodes reported about one attempt at a request. It is dropped when the request ends."""

    request: RequestRecord
    decode: NodeLink
    index: int  # index among the request's attempts, from 0
    num_known_tokens: int  # prompt and generated tokens when the attempt began
    traced: trace.Span  # the attempt's span in the request's trace
    num_tokens_to_compute: int | None = None  # known tokens that the decode node computes; None: no grant yet
    kv_ready: KvReady | None = None
    prefill: PrefillFigures | None = None  # figures of the last transfer; None: the prefill node has not answered
    has_tokens: bool = False
    num_new_tokens: int = 0
    opening: Span | None = None
    decoding: Span | None = None

    @property
    def filled_by(self) -> PrefillFigures | None:
        """The prefill node's figures of the completed transfer; None if there are none."""
        return None if self.kv_ready is None else self.prefill

    @property
    def num_cached_tokens(self) -> int | None:
        """Known tokens that no node had to compute for this attempt; None if the prompt's KV was never complete."""
        if self.num_tokens_to_compute is None or not (self.kv_ready is not None or self.has_tokens):
            return None
        num_prefilled = 0 if self.filled_by is None else self.filled_by.num_computed_tokens
        return self.num_known_tokens - self.num_tokens_to_compute - num_prefilled

    def ask(self, detail: str = "") -> None:
        """Begins the span OPEN, which lasts until the decode node answers the request for room."""
        self.opening = self._begin(SpanKind.OPEN, self.decode, detail)

    def take_grant(self, granted: Granted) -> None:
        """Records the answer to `ask`."""
        self._end_opening()
        if self not in self.request.attempts:
            self.request.attempts.append(self)
        self.num_tokens_to_compute = granted.num_tokens_to_compute
        self.request.add_node(self.decode.stamp)
        if self.request.admitted_at is None:
            self.request.admit(granted)
        if not granted.kv_address:
            self._begin_decoding(f"the node computes {granted.num_tokens_to_compute} known tokens itself")

    def begin_prefill(self, link: PrefillLink) -> Span:
        """Begins the span of a call to a prefill node. The caller passes it to `end_prefill`."""
        self.prefill = None
        self.request.add_node(link.stamp)
        span = self._begin(SpanKind.PREFILL, link)
        span.traced = self.request.begin_traced(self.traced, span.kind, trace.SpanKind.CLIENT)
        span.traced.set_attribute("outrider.prefill_node", link.name)
        return span

    def end_prefill(self, span: Span, result: PrefillFigures | str) -> None:
        """Ends the span of a prefill call. `result`: the node's answer, or the reason for its absence."""
        if isinstance(result, str):
            fail(span.traced, "PREFILL_FAILED")
            span.close(result)
            return
        self.prefill = result
        span.num_tokens, span.num_bytes = result.num_computed_tokens, result.kv_bytes
        span.close(f"{result.num_cached_tokens} tokens cached, {result.num_read_tokens} read")
        for part in prefill_spans(span, result):
            self.request.add_span(part)

    def take_ready(self, ready: KvReady) -> None:
        """Records that the decode node has complete KV, possibly from a transfer that the router had given up."""
        self._end_opening()
        self.kv_ready = ready
        span = self._begin(SpanKind.KV_TRANSFER, self.decode, ready.connector)
        span.end, span.num_bytes = span.start, ready.kv_bytes
        span.start = max(span.end - ready.transfer_seconds, self.request.arrived_at)
        self._begin_decoding()

    def take_tokens(self, tokens: SampleTokens, num_new: int, now: float) -> None:
        """Records a message with tokens. Called for every token, so it must be cheap.

        `num_new`: the number of tokens that the answer did not have yet. `now`: monotonic seconds.
        """
        request, counts = self.request, tokens.speculation
        self.has_tokens = True
        if counts is not NO_SPECULATION:
            request.speculation.add(counts)
        if num_new:
            self.num_new_tokens += num_new
            request.add_tokens(tokens.sample, num_new, now)
        token_ids: tuple[int, ...] = ()
        rejected_token_ids: tuple[int, ...] = ()
        size = 1
        if request.records_tokens:
            token_ids, rejected_token_ids = tokens.token_ids, tokens.rejected_draft_token_ids[:MAX_REJECTED]
            size += (len(token_ids) + len(rejected_token_ids)) // TOKENS_PER_EXTRA_STEP
        if len(request.steps) >= MAX_REQUEST_STEPS or not request.reserve_steps(size):
            request.num_dropped_steps += 1
            return
        request.size += size
        decode = self.decode
        step = (
            tokens.sample,
            self.index,
            decode.name,
            now,
            tokens.start_position,
            len(tokens.token_ids),
            counts.num_draft_tokens,
            counts.num_accepted_draft_tokens,
            counts.num_wanting_steps > 0,
            counts.num_hit_steps > 0,
            0 if decode.report is None else decode.report.load.num_running,
            token_ids,
            rejected_token_ids,
        )
        request.steps.append(tuple.__new__(Step, step))  # takes half the time of Step(…)

    def end(self, why: str) -> None:
        """Records that the attempt has left its decode node. `why`: empty if it was successful. Idempotent."""
        if self.decoding is not None and self.decoding.end is None:
            self.decoding.num_tokens = self.num_new_tokens
            self.decoding.close(why)
        self._end_opening(why)

    def _begin(self, kind: SpanKind, link: NodeLink, detail: str = "") -> Span:
        return self.request.add_span(Span(kind, time.monotonic(), self.index, link.name, detail=detail))

    def _end_opening(self, detail: str = "") -> None:
        if self.opening is not None:
            self.opening.close(detail)

    def _begin_decoding(self, detail: str = "") -> None:
        if self.decoding is None:
            self.decoding = self._begin(SpanKind.DECODE, self.decode, detail)


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One request's record, made by `Records`. Owned by the event loop.

    Times are monotonic seconds, or None for events that have not happened yet.
    """

    serial: int  # unique in this router, unlike the id, which clients may reuse
    request_id: str
    metrics: RouterMetrics
    reserve_steps: Callable[[int], bool]  # reserves room for this many steps; returns False if there is no room
    records_tokens: bool  # whether token ids are recorded, which reveal the answer's text
    tracer: Tracer
    traced: trace.Span  # the span of the whole request, in its client's trace
    arrived_at: float = field(default_factory=time.monotonic)
    admitted_at: float | None = None  # time of the first grant
    first_token_at: float | None = None
    last_token_at: dict[int, float] = field(default_factory=dict)  # by sample; empty once the request has ended
    ended_at: float | None = None
    outcome: RequestState | None = None
    error: str = ""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # set when the answer is complete
    num_generated_tokens: int = 0  # all tokens of the answer, including those from a router that was lost
    num_samples: int = 0
    seed: int = 0
    adapter: str = ""  # its name; empty: the model itself
    verification_method: VerificationMethod = VerificationMethod.COUPLED
    attempts: list[AttemptRecord] = field(default_factory=list)
    """Attempts that got a grant or are traced, until the request ends. Others, which may be very many, are not kept."""
    num_attempts: int = 0  # number of attempts, including those that a decode node refused
    num_traced: int = 0  # number of spans below `traced` in the trace
    finish_reasons: list[str] = field(default_factory=list)  # why the samples ended, in the order of the samples
    has_moved: bool = False  # whether work has moved since the last token
    num_moves: int = 0  # migrations of work from a prefill or decode node
    stamps: list[NodeVersion] = field(default_factory=list)  # of nodes that worked on the request, by first use
    speculation: SpeculationTotals = field(default_factory=SpeculationTotals)
    spans: list[Span] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    num_dropped_steps: int = 0
    size: int = 0  # size of `steps`; a step without token ids counts 1

    @property
    def state(self) -> RequestState:
        if self.outcome is not None:
            return self.outcome
        return RequestState.WAITING if self.admitted_at is None else RequestState.RUNNING

    @property
    def nodes(self) -> tuple[str, ...]:
        """The distinct names in `stamps`. (A node that was restarted in another version has two stamps.)"""
        return tuple(dict.fromkeys(stamp.name for stamp in self.stamps))

    def since_arrival(self, at: float | None) -> float:
        """Returns the seconds since arrival; 0 if `at` is None."""
        return 0.0 if at is None else max(at - self.arrived_at, 0.0)

    # ------------------------------------------------------------ events

    def take_request(self, request: Request, *, model: str, num_generated_tokens: int = 0) -> None:
        """Records the encoded request. `num_generated_tokens`: tokens generated earlier by a router that was lost."""
        sampling = request.options.sampling
        self.num_prompt_tokens, self.num_samples = len(request.prompt_token_ids), sampling.n
        self.num_generated_tokens = num_generated_tokens
        self.adapter = "" if request.options.adapter is None else request.options.adapter.name
        self.seed, self.verification_method = sampling.seed, request.options.verification_method
        if self.traced.is_recording():
            self.traced.set_attributes(request_attributes(request, model=model))

    def begin_span(self, kind: SpanKind) -> Span:
        """Begins a span of the router's own work (ENCODE, QUEUE). The caller closes it."""
        traced = self.begin_traced(self.traced, kind)
        return self.add_span(Span(kind, time.monotonic(), self.num_attempts, traced=traced))

    def add_span(self, span: Span) -> Span:
        """Adds the span, unless the record already has `MAX_REQUEST_SPANS`. Returns the span."""
        if len(self.spans) < MAX_REQUEST_SPANS:
            span.detail = span.detail[:MAX_DETAIL_CHARS]
            self.spans.append(span)
        return span

    def begin_traced(self, parent: trace.Span, name: str, kind: trace.SpanKind = trace.SpanKind.INTERNAL) -> trace.Span:
        """Begins a span of the trace, or returns an invalid one if the trace already has `MAX_TRACED`."""
        if self.num_traced >= MAX_TRACED:
            return trace.INVALID_SPAN
        self.num_traced += 1
        return self.tracer.child(parent, name, kind=kind)

    def begin_attempt(self, decode: NodeLink, *, num_known_tokens: int) -> AttemptRecord:
        """Begins another attempt. `num_known_tokens`: prompt and generated tokens."""
        traced = self.begin_traced(self.traced, "attempt")
        attempt = AttemptRecord(self, decode, self.num_attempts, num_known_tokens, traced)
        self.num_attempts += 1
        if traced.is_recording():
            self.attempts.append(attempt)
        return attempt

    def admit(self, granted: Granted) -> None:
        """Records the first grant."""
        self.admitted_at = time.monotonic()
        queue_seconds = self.since_arrival(self.admitted_at)
        self.metrics.observe_admitted(queue_seconds=queue_seconds, num_prompt_tokens=self.num_prompt_tokens)
        _log.info(
            "request admitted",
            request_id=self.request_id,
            nodes=list(self.nodes),
            num_prompt_tokens=self.num_prompt_tokens,
            num_held_tokens=granted.held_prefix_length,
            seed=self.seed,
            queue_seconds=round(queue_seconds, 4),
        )

    def add_node(self, stamp: NodeVersion) -> None:
        """Records that this node works on the request."""
        if stamp not in self.stamps:
            self.stamps.append(stamp)

    def add_tokens(self, sample: int, num_tokens: int, now: float) -> None:
        """Records a sample's new tokens that arrived together."""
        metrics, last_token_at = self.metrics, self.last_token_at
        self.num_generated_tokens += num_tokens
        if self.first_token_at is None:
            self.first_token_at = now
            metrics.observe_first_token(now - self.arrived_at)
        elif self.has_moved and last_token_at:
            metrics.observe_migration_gap(now - max(last_token_at.values()))
        self.has_moved = False
        last = last_token_at.get(sample)
        metrics.observe_tokens(num_tokens, None if last is None else now - last)
        last_token_at[sample] = now

    def add_move(self, cause: str, *, node: str, error: OutriderError | None = None) -> None:
        """Records a migration: another node computes the next tokens, or helps to compute them.

        `cause` is one of `MOVE_CAUSES`; `node` is the name of the node that lost the request.
        """
        message = "" if error is None else error.message
        self.has_moved = True
        self.num_moves += 1
        self.metrics.add_move(cause)
        if len(self.moves) < MAX_REQUEST_MOVES:
            self.moves.append(Move(time.monotonic(), cause, node, message[:MAX_DETAIL_CHARS]))
            self.traced.add_event("moved", {"outrider.cause": cause, "outrider.node": node})
        _log.warning(
            "work moves to another node",
            request_id=self.request_id,
            cause=cause,
            node=node,
            error=message,
            num_generated_tokens=self.num_generated_tokens,
        )

    def mark_end(self) -> None:
        """Records that the last sample has ended. Only the first call has an effect."""
        if self.ended_at is None:
            self.ended_at = time.monotonic()

    def close(self, failure: OutriderError | None) -> None:
        """Counts the outcome in metrics. If there is neither a failure nor a summary, the client has left."""
        if len({stamp.numerics for stamp in self.stamps if stamp.numerics}) > 1:
            self.metrics.add_mixed_numerics()
        if failure is None and self.outcome is None:
            self.metrics.add_failures(CLIENT_LEFT, 1)
        if failure is not None:
            self.metrics.add_failures(failure.reason, 1)
            _log.warning("request failed", request_id=self.request_id, error=failure.message, reason=failure.reason)

    def end(self, error: OutriderError | None) -> None:
        """Ends the record. If there is neither an error nor an outcome, the client has left. Idempotent."""
        self.mark_end()
        if error is not None:
            self.outcome, self.error = RequestState.FAILED, error.message[:MAX_DETAIL_CHARS]
            if not self.records_tokens:  # messages of the errors below may quote the request
                if isinstance(error, InvalidRequestError):
                    self.error = f"{error.reason}: {error.field}"
                elif isinstance(error, InternalError):
                    self.error = f"{error.reason}: see the router's log"
        elif self.outcome is None:
            self.outcome = RequestState.ABORTED
        for span in self.spans:
            span.close()
