"""The spans of one Prefill call: its own, and its push's below it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from outrider.prefill import PrefillCall, PrefillFigures
from outrider.service.telemetry.tracing import Span, SpanEvent, TraceContext, Tracer


@dataclass(slots=True)
class Outcome:
    """Filled in by the block that is `traced`."""

    figures: PrefillFigures | None = None


@contextmanager
def traced(tracer: Tracer, call: PrefillCall, parent: TraceContext) -> Iterator[Outcome]:
    """Records the block's spans, however it ends."""
    outcome, context = Outcome(), tracer.join(parent)
    if not context:
        yield outcome
        return
    started_at, error = time.monotonic(), ""
    try:
        yield outcome
    except asyncio.CancelledError:  # its router has given it up, as with a client that leaves
        raise
    except BaseException as failure:
        error = getattr(failure, "reason", type(failure).__name__)
        raise
    finally:
        ended_at, figures = time.monotonic(), outcome.figures or PrefillFigures()
        events = [
            SpanEvent("chunk", started_at + chunk.end_seconds, {"outrider.num_tokens": chunk.num_tokens})
            for chunk in figures.chunks
        ]
        if outcome.figures is None and not error:
            events.append(SpanEvent("cancelled", ended_at))
        first_push = figures.pushed[0].start_seconds if figures.pushed else ended_at - started_at
        push = Span(
            name="kv_push",
            context=context.child("kv_push"),
            started_at=started_at + first_push,
            ended_at=ended_at,
            kind="client",
            attributes={
                "outrider.connector": figures.connector,
                "outrider.kv_bytes": figures.kv_bytes,
                "outrider.exposed_seconds": figures.exposed_seconds,
            },
        )
        whole = Span(
            name="prefill",
            context=context,
            started_at=started_at,
            ended_at=ended_at,
            kind="server",
            attributes={
                "gen_ai.request.id": call.request_id,
                "outrider.num_known_tokens": len(call.token_ids),
                "outrider.num_held_tokens": call.held_prefix_length,
                "outrider.num_cached_tokens": figures.num_cached_tokens,
                "outrider.num_computed_tokens": figures.num_computed_tokens,
                "outrider.num_read_tokens": figures.num_read_tokens,
                "outrider.compute_seconds": figures.compute_seconds,
            },
            events=events,
            error=error,
        )
        for span in (whole,) if outcome.figures is None else (push, whole):
            tracer.record(span)
