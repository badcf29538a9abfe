"""The parts of a request's record, all bounded: timed spans, steps, moves, and draft totals.

Times are seconds on the router's monotonic clock. An event's time is when the router saw it.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from opentelemetry import trace

from outrider.answer import SpeculationMetrics
from outrider.prefill import PrefillFigures, TimedPart
from outrider.request import Request
from outrider.session import SpeculationCounts

TOKENS_PER_EXTRA_STEP = 6
"""Number of recorded token ids that count as one extra step against the limit on steps of all requests."""
MAX_REQUEST_STEPS = 5_000
"""Maximum steps recorded of one request. Later ones are only counted."""
MAX_REJECTED = 256
"""Maximum rejected draft tokens recorded per step."""
MAX_REQUEST_SPANS = 1_000
"""Maximum spans recorded of one request. Later ones are dropped."""
MAX_REQUEST_MOVES = 100
"""Maximum moves recorded of one request. Later ones are only counted."""
MAX_TRACED = 256
"""Maximum spans that the router adds to a request's trace. Later ones are dropped."""
MAX_DETAIL_CHARS = 500
"""Maximum characters recorded of a node's message, which may be of any length."""


class SpanKind(enum.StrEnum):
    """What a span measures. The kinds are in the order in which they usually occur."""

    ENCODE = "encode"  # encoding of the prompt in the router, including compilation of a constraint
    QUEUE = "queue"  # wait in the router's queue
    OPEN = "open"  # from the request for room on a decode node to its grant
    PREFILL = "prefill"  # from the call to a prefill node to its answer
    PREFILL_CHUNK = "prefill_chunk"  # computation of a part of the prompt by one forward pass; very many are merged
    KV_FRAME = "kv_frame"  # transfer of a chunk's KV for a group of layers, from its queueing to its acknowledgement
    KV_TRANSFER = "kv_transfer"  # from the first frame to complete KV, as measured by the decode node
    DECODE = "decode"  # from complete KV (or the grant, if the decode node computes the prompt) to the attempt's end


class RequestState(enum.StrEnum):
    WAITING = "waiting"  # until the first grant
    RUNNING = "running"
    FINISHED = "finished"
    ABORTED = "aborted"  # aborted by its client, which may have left
    FAILED = "failed"


@dataclass(slots=True)
class Span:
    """One timed part of a request, for example its wait in the queue."""

    kind: SpanKind
    start: float
    attempt: int  # index of its attempt, from 0; a span between attempts belongs to the next
    node: str = ""  # empty: the router itself
    end: float | None = None  # None: not ended
    num_tokens: int | None = None
    num_bytes: int | None = None
    detail: str = ""
    traced: trace.Span = trace.INVALID_SPAN  # this span in the request's trace; set only for some kinds

    def close(self, detail: str = "") -> None:
        """Ends the span now. Idempotent."""
        if self.end is None:
            self.end = time.monotonic()
            self.detail = detail[:MAX_DETAIL_CHARS] or self.detail
            self.traced.end()
            self.traced = trace.INVALID_SPAN  # a record outlives its trace


class Step(NamedTuple):
    """Tokens of one sample that arrived together, from one step of its decode node."""

    sample: int
    attempt: int
    node: str  # the attempt's decode node
    at: float  # time of arrival at the router
    position: int  # position of the first token
    num_tokens: int
    num_draft_tokens: int  # verified draft tokens
    num_accepted: int
    wanted_drafts: bool
    found_drafts: bool  # whether a draft node's proposal was ready
    batch: int  # sequences running on the node, according to its last report
    token_ids: tuple[int, ...]  # this and the next field are empty unless text may be shown
    rejected_token_ids: tuple[int, ...]  # rejected draft tokens, in the order of their rows


class Move(NamedTuple):
    """A migration: another decode node continued the request, or another prefill node computed its prompt."""

    at: float
    cause: str  # a label value of outrider:moves_total
    node: str  # the node that lost the request
    error: str


@dataclass(slots=True)
class SpeculationTotals:
    """Totals of what decode nodes reported about a request's drafts."""

    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_wanting_steps: int = 0
    num_hit_steps: int = 0
    acceptance_histogram: list[int] = field(default_factory=list)

    def add(self, counts: SpeculationCounts) -> None:
        """Adds the counts of one step. Called for every token, so it must be cheap."""
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
        """Returns the totals with their rates; all are zero if nothing was drafted."""
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


def prefill_spans(call: Span, figures: PrefillFigures) -> list[Span]:
    """Returns spans of a prefill node's work in an ended call. Times in `figures` start when the node gets the call."""
    assert call.end is not None
    ended_at = call.end
    # Assumes that the request and the response took equally long on the network.
    arrived_at = call.start + max(ended_at - call.start - figures.call_seconds, 0.0) / 2

    def part_of(kind: SpanKind, part: TimedPart, num_tokens: int | None = None, num_bytes: int | None = None) -> Span:
        start, end = (min(arrived_at + seconds, ended_at) for seconds in (part.start_seconds, part.end_seconds))
        return Span(kind, start, call.attempt, call.node, max(start, end), num_tokens, num_bytes)

    return [
        *(part_of(SpanKind.PREFILL_CHUNK, chunk, num_tokens=chunk.amount) for chunk in figures.chunks),
        *(part_of(SpanKind.KV_FRAME, pushed, num_bytes=pushed.amount) for pushed in figures.pushed),
    ]


def request_attributes(request: Request, *, model: str) -> Mapping[str, str | int | float]:
    """Returns a request's trace attributes. Their names are OpenTelemetry's, except vLLM's `gen_ai.request.id`."""
    sampling = request.options.sampling
    return {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "outrider",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.request.id": request.request_id,
        "gen_ai.request.choice.count": sampling.n,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
    }
