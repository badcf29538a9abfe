"""A request's trace: what the router's spans say of it once it has ended, by its timeline."""

from __future__ import annotations

import time
from collections.abc import Mapping

from opentelemetry.trace import INVALID_SPAN

from outrider.request import Request
from outrider.service.telemetry.tracing import fail, nanoseconds
from router.observe.timeline import SpanKind, Timeline


def request_attributes(request: Request, *, model: str) -> Mapping[str, str | int | float]:
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


def end_trace(timeline: Timeline, *, error: str) -> None:
    """The request has ended. `error` is the reason of its failure, or empty."""
    for attempt in range(len(timeline.traced_attempts)):
        _end_attempt(timeline, attempt)
    whole, arrived_at = timeline.traced, timeline.arrived_at
    num_input_tokens, num_output_tokens = timeline.num_prompt_tokens, timeline.num_generated_tokens
    ended_at = time.monotonic() if timeline.ended_at is None else timeline.ended_at
    whole.set_attributes(
        {
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
    )
    if timeline.admitted_at is not None:
        whole.set_attribute("gen_ai.latency.time_in_queue", timeline.admitted_at - arrived_at)
    if timeline.first_token_at is not None:
        whole.set_attribute("gen_ai.latency.time_to_first_token", timeline.first_token_at - arrived_at)
    if error:
        fail(whole, error)
    whole.end(nanoseconds(ended_at))
    timeline.traced, timeline.traced_attempts = INVALID_SPAN, []


def _end_attempt(timeline: Timeline, attempt: int) -> None:
    """It ends with its work on the decode node; why the request moved on is known later."""
    traced, node = timeline.traced_attempts[attempt], timeline.attempts[attempt]
    traced.set_attributes({"outrider.attempt": attempt, "outrider.decode_node": node})
    spans = [s for s in timeline.spans if s.attempt == attempt and s.kind in (SpanKind.OPEN, SpanKind.DECODE)]
    ends = [span.end for span in spans if span.end is not None]
    causes = [move.cause for move in timeline.moves if spans and move.node == node and move.at >= spans[0].start]
    if causes:
        traced.set_attribute("outrider.moved_because", causes[0])
        if causes[0] != "draining":
            fail(traced, causes[0])
    traced.end(nanoseconds(max(ends)) if ends else None)
