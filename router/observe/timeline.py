"""Timelines: one bounded record of what happened to each recent request, for whoever asks why it took so long (ADR 36).

A request's spans are what took time (queueing, a prefill call, decoding); its steps are the
messages in which tokens came; its moves are the changes of nodes. All of it is what the router
has seen, at the times at which it saw it, on one clock.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from opentelemetry import trace

from outrider.answer import SpeculationMetrics
from outrider.errors import InternalError, InvalidRequestError, OutriderError
from outrider.node_stamp import NodeStamp
from outrider.service.telemetry.tracing import NO_TRACER, Tracer
from outrider.session import SampleTokens, SpeculationCounts

TOKENS_OF_A_STEP = 6
"""For each of which a step with token ids counts once more against the bounds."""
MAX_REQUEST_STEPS = 5_000
"""Steps kept of one request. Further ones are only counted."""
MAX_REJECTED = 256
"""Draft tokens of one step."""
MAX_REQUEST_SPANS = 1_000
MAX_REQUEST_MOVES = 100
"""Moves kept of one request, the first ones."""
MAX_TRACED = 128
"""Spans that a request's trace has of attempts, and of other work of the router."""
MAX_WORDS = 500
"""Characters kept of a message of a node, which may send anything."""


class SpanKind(enum.StrEnum):
    """What a span of a request measures, in the order in which a request usually goes through them."""

    ENCODE = "encode"  # the prompt, in the router; an answer's constraint is compiled in it
    QUEUE = "queue"  # for a place on nodes
    OPEN = "open"  # a decode node is asked for room, until it grants it
    PREFILL = "prefill"  # the call to a prefill node, until its answer
    PREFILL_CHUNK = "prefill_chunk"  # a part of the prompt in one forward pass, or in several with others
    KV_FRAME = "kv_frame"  # KV of a chunk and a group of layers, from the sender's hand to its acknowledgement
    KV_TRANSFER = "kv_transfer"  # the first frame to complete KV, as the decode node has measured it
    DECODE = "decode"  # from complete KV, or the grant where a decode node computes the prompt, to the attempt's end


class RequestState(enum.StrEnum):
    WAITING = "waiting"  # for its first grant
    RUNNING = "running"
    FINISHED = "finished"
    ABORTED = "aborted"  # by its client, who may have left
    FAILED = "failed"


@dataclass(slots=True)
class Span:
    """One part of a request that took time, such as its wait in the queue. Times are monotonic seconds."""

    kind: SpanKind
    start: float
    attempt: int  # from 0; the one that it leads to
    node: str = ""  # the router's own where it is empty
    end: float | None = None  # None: it goes on
    num_tokens: int | None = None
    num_bytes: int | None = None
    detail: str = ""
    traced: trace.Span = trace.INVALID_SPAN  # in the request's trace; of some kinds

    def close(self, detail: str = "") -> None:
        """Ends the span now. A second call does nothing."""
        if self.end is None:
            self.end = time.monotonic()
            self.detail = detail[:MAX_WORDS] or self.detail
            self.traced.end()
            self.traced = trace.INVALID_SPAN  # a timeline is kept for longer than its trace


class Step(NamedTuple):
    """Tokens that came together, of one sample: a step of its decode node."""

    sample: int
    attempt: int
    at: float  # monotonic seconds: their arrival at the router
    position: int  # of the first one
    num_tokens: int
    num_draft_tokens: int  # that were verified
    num_accepted: int
    wanted_drafts: bool
    found_drafts: bool  # a draft node's proposal was waiting
    batch: int  # sequences that ran on the node, by its last report
    token_ids: tuple[int, ...]  # empty unless text may be shown, as the next
    rejected_token_ids: tuple[int, ...]  # of the draft, in the order of their rows


class Move(NamedTuple):
    """The request moved: another decode node went on with it, or another prefill node computed its prompt."""

    at: float  # monotonic seconds
    cause: str  # as in outrider:moves_total
    node: str  # that lost it
    error: str


@dataclass(slots=True)
class SpeculationTotals:
    """What drafts have come to over a request: sums of what decode nodes report. One addition a token: kept cheap."""

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


@dataclass(slots=True, eq=False)
class Timeline:
    """One request's record. Owned by the event loop. Times are monotonic seconds; None: it has not happened."""

    serial: int  # its name here: clients' names may come again
    request_id: str
    take_room: Callable[[int], bool]  # for so many steps more; False: there is none
    keeps_tokens: bool = False
    tracer: Tracer = NO_TRACER
    traced: trace.Span = trace.INVALID_SPAN  # the whole request, in its caller's trace
    arrived_at: float = field(default_factory=time.monotonic)
    admitted_at: float | None = None  # the first grant
    first_token_at: float | None = None
    ended_at: float | None = None
    outcome: RequestState | None = None
    error: str = ""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # known at the end
    num_generated_tokens: int = 0
    num_samples: int = 0
    attempts: list[str] = field(default_factory=list)  # the decode node of each, those included that refused it
    traced_attempts: list[trace.Span] = field(default_factory=list)  # the first `MAX_TRACED`
    num_traced: int = 0  # other spans of the router in the trace
    finish_reasons: list[str] = field(default_factory=list)  # of samples that have ended, in their order
    num_moves: int = 0  # times that work moved from a prefill or decode node
    stamps: list[NodeStamp] = field(default_factory=list)  # of nodes that worked on it, in the order of their first use
    speculation: SpeculationTotals = field(default_factory=SpeculationTotals)
    spans: list[Span] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    num_dropped_steps: int = 0
    size: int = 0  # of `steps`, in those without tokens

    @property
    def state(self) -> RequestState:
        if self.outcome is not None:
            return self.outcome
        return RequestState.WAITING if self.admitted_at is None else RequestState.RUNNING

    @property
    def nodes(self) -> tuple[str, ...]:
        """The names in `stamps`: a node that was restarted meanwhile has two stamps."""
        return tuple(dict.fromkeys(stamp.name for stamp in self.stamps))

    def add_node(self, stamp: NodeStamp) -> None:
        """It works on the request."""
        if stamp not in self.stamps:
            self.stamps.append(stamp)

    def begin_attempt(self, node: str) -> trace.Span:
        """On this decode node. Returns its span in the trace."""
        self.attempts.append(node)
        if len(self.attempts) > MAX_TRACED:
            return trace.INVALID_SPAN
        self.traced_attempts.append(self.tracer.child(self.traced, "attempt"))
        return self.traced_attempts[-1]

    def begin(self, kind: SpanKind, *, node: str = "", attempt: int | None = None, detail: str = "") -> Span:
        """A span that begins now. `attempt`: None for the next one to be opened."""
        start, attempt = time.monotonic(), len(self.attempts) if attempt is None else attempt
        span = Span(kind, start, attempt, node, detail=detail)
        if kind in (SpanKind.ENCODE, SpanKind.QUEUE):
            self.show(span, self.traced)
        return self.add_span(span)

    def show(self, span: Span, parent: trace.Span, kind: trace.SpanKind = trace.SpanKind.INTERNAL) -> None:
        """Shows a span that begins now in the trace, too."""
        if self.num_traced < MAX_TRACED:
            self.num_traced += 1
            span.traced = self.tracer.child(parent, span.kind, kind=kind)

    def add_span(self, span: Span) -> Span:
        if len(self.spans) < MAX_REQUEST_SPANS:
            span.detail = span.detail[:MAX_WORDS]
            self.spans.append(span)
        return span

    def add_step(self, tokens: SampleTokens, *, at: float, attempt: int, batch: int) -> None:
        """Records a message with tokens. It is on the path of every token, so it must stay cheap."""
        token_ids: tuple[int, ...] = ()
        rejected_token_ids: tuple[int, ...] = ()
        size = 1
        if self.keeps_tokens:
            token_ids, rejected_token_ids = tokens.token_ids, tokens.rejected_draft_token_ids[:MAX_REJECTED]
            size += (len(token_ids) + len(rejected_token_ids)) // TOKENS_OF_A_STEP
        if len(self.steps) >= MAX_REQUEST_STEPS or not self.take_room(size):
            self.num_dropped_steps += 1
            return
        self.size += size
        counts = tokens.speculation
        step = (
            tokens.sample,
            attempt,
            at,
            tokens.start_position,
            len(tokens.token_ids),
            counts.num_draft_tokens,
            counts.num_accepted_draft_tokens,
            counts.num_wanting_steps > 0,
            counts.num_hit_steps > 0,
            batch,
            token_ids,
            rejected_token_ids,
        )
        self.steps.append(tuple.__new__(Step, step))  # half the time of Step(…)

    def add_move(self, cause: str, *, node: str, error: str) -> None:
        self.num_moves += 1
        if len(self.moves) < MAX_REQUEST_MOVES:
            self.moves.append(Move(time.monotonic(), cause, node, error[:MAX_WORDS]))
            self.traced.add_event("moved", {"outrider.cause": cause, "outrider.node": node})

    def end(self, error: OutriderError | None) -> None:
        """However the request ended; without an error and an outcome its client has left. Idempotent."""
        if self.ended_at is None:
            self.ended_at = time.monotonic()
        if error is not None:
            self.outcome, self.error = RequestState.FAILED, error.message[:MAX_WORDS]
            if not self.keeps_tokens:  # messages of these may quote the request
                if isinstance(error, InvalidRequestError):
                    self.error = f"{error.reason}: {error.field}"
                elif isinstance(error, InternalError):
                    self.error = f"{error.reason}: the router's log says more"
        elif self.outcome is None:
            self.outcome = RequestState.ABORTED
        for span in self.spans:
            span.close()
