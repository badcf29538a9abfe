"""What a router tells a trace of a request: its timeline, when it has ended, and places for what it asks of nodes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

from outrider.request import Request
from outrider.service.telemetry.tracing import Attributes, Span, SpanEvent, TraceContext
from router.timeline import SpanKind, Timeline

MAX_SPANS = 128
"""Of one request; nodes that refuse it again and again make no more."""


def request_attributes(request: Request, *, model: str) -> Attributes:
    """What was asked for, by OpenTelemetry's names; `gen_ai.request.id` is vLLM's."""
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


def attempt_place(timeline: Timeline, attempt: int) -> TraceContext:
    """Below which a decode node records."""
    return timeline.place.child(f"attempt {attempt}")


def prefill_place(timeline: Timeline, attempt: int, number: int) -> TraceContext:
    """Below which a prefill node records. `number`: of the attempt's calls."""
    return attempt_place(timeline, attempt).child(f"prefill {number}")


def spans_of(timeline: Timeline, *, error: str) -> Iterator[Span]:
    """Of a request that has ended; `error` is the reason of its failure, or empty."""
    yield _request_span(timeline, error)
    numbers: Counter[int] = Counter()  # of prefill calls, by attempt
    told = [span for span in timeline.spans if span.kind in (SpanKind.ENCODE, SpanKind.QUEUE, SpanKind.PREFILL)]
    for number, span in enumerate(told[:MAX_SPANS]):
        ended_at = span.start if span.end is None else span.end
        if span.kind is not SpanKind.PREFILL:
            place = timeline.place.child(f"{span.kind} {number}")
            yield Span(name=span.kind, context=place, started_at=span.start, ended_at=ended_at)
        else:
            yield Span(
                name="prefill",
                context=prefill_place(timeline, span.attempt, numbers[span.attempt]),
                started_at=span.start,
                ended_at=ended_at,
                kind="client",
                attributes={"outrider.prefill_node": span.node},
                error="PREFILL_FAILED" if span.num_tokens is None and span.detail else "",
            )
            numbers[span.attempt] += 1
    for attempt in range(min(len(timeline.attempts), MAX_SPANS)):
        yield from _attempt_span(timeline, attempt)


def _request_span(timeline: Timeline, error: str) -> Span:
    num_input_tokens, num_output_tokens = timeline.num_prompt_tokens, timeline.num_generated_tokens
    arrived_at = timeline.arrived_at
    ended_at = time.monotonic() if timeline.ended_at is None else timeline.ended_at
    attributes: dict[str, str | int | float | list[str]] = {
        "gen_ai.usage.input_tokens": num_input_tokens,
        "gen_ai.usage.output_tokens": num_output_tokens,
        "gen_ai.usage.cache_read.input_tokens": timeline.num_cached_tokens,
        "gen_ai.response.finish_reasons": timeline.finish_reasons,
        # vLLM's names, which dashboards know.
        "gen_ai.usage.prompt_tokens": num_input_tokens,
        "gen_ai.usage.completion_tokens": num_output_tokens,
        "gen_ai.latency.e2e": ended_at - arrived_at,
        "outrider.state": timeline.state,
        "outrider.num_attempts": len(timeline.attempts),
        "outrider.num_moves": timeline.num_moves,
        "outrider.mean_acceptance_length": timeline.speculation.metrics().mean_acceptance_length,
    }
    if timeline.admitted_at is not None:
        attributes["gen_ai.latency.time_in_queue"] = timeline.admitted_at - arrived_at
    if timeline.first_token_at is not None:
        attributes["gen_ai.latency.time_to_first_token"] = timeline.first_token_at - arrived_at
    return Span(
        name="generate",
        context=timeline.place,
        started_at=arrived_at,
        ended_at=ended_at,
        kind="server",
        attributes={**timeline.asked, **attributes},
        events=[
            SpanEvent("moved", move.at, {"outrider.cause": move.cause, "outrider.node": move.node})
            for move in timeline.moves
        ],
        error=error,
    )


def _attempt_span(timeline: Timeline, attempt: int) -> Iterator[Span]:
    """None where the timeline was full."""
    spans = [s for s in timeline.spans if s.attempt == attempt and s.kind in (SpanKind.OPEN, SpanKind.DECODE)]
    if not spans:
        return
    started_at, node = spans[0].start, timeline.attempts[attempt]
    ends = [span.end for span in spans if span.end is not None]
    causes = [move.cause for move in timeline.moves if move.node == node and move.at >= started_at]
    attributes: dict[str, str | int] = {"outrider.attempt": attempt, "outrider.decode_node": node}
    if causes:
        attributes["outrider.moved_because"] = causes[0]
    yield Span(
        name="attempt",
        context=attempt_place(timeline, attempt),
        started_at=started_at,
        ended_at=max(ends, default=started_at),
        attributes=attributes,
        error=causes[0] if causes and causes[0] != "draining" else "",
    )
