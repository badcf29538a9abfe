"""The spans of one Prefill call: its own, and its push's below it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from opentelemetry.trace import SpanKind

from outrider.prefill import PrefillCall, PrefillFigures
from outrider.service.telemetry.tracing import Metadata, Tracer, caller_of_call, fail


@dataclass(slots=True)
class Outcome:
    """Filled in by the block that is `traced`."""

    figures: PrefillFigures | None = None


@contextmanager
def traced(tracer: Tracer, call: PrefillCall, metadata: Metadata | None) -> Iterator[Outcome]:
    """Records the block's spans, however it ends. `metadata`: of the router's call."""
    outcome, whole = Outcome(), tracer.join("prefill", caller_of_call(metadata))
    if not whole.is_recording():
        yield outcome
        return
    started_at = time.time_ns()
    try:
        yield outcome
    except asyncio.CancelledError:  # its router has given it up, as with a client that leaves
        whole.add_event("cancelled")
        raise
    except BaseException as failure:
        fail(whole, getattr(failure, "reason", type(failure).__name__))
        raise
    finally:
        ended_at, figures = time.time_ns(), outcome.figures or PrefillFigures()

        def since_start(seconds: float) -> int:
            return started_at + round(seconds * 1e9)

        whole.set_attributes(
            {
                "gen_ai.request.id": call.request_id,
                "outrider.num_known_tokens": len(call.token_ids),
                "outrider.num_held_tokens": call.held_prefix_length,
                "outrider.num_cached_tokens": figures.num_cached_tokens,
                "outrider.num_computed_tokens": figures.num_computed_tokens,
                "outrider.num_read_tokens": figures.num_read_tokens,
                "outrider.compute_seconds": figures.compute_seconds,
            }
        )
        for chunk in figures.chunks:
            whole.add_event("chunk", {"outrider.num_tokens": chunk.num_tokens}, since_start(chunk.end_seconds))
        if outcome.figures is not None:
            pushed_at = since_start(figures.pushed[0].start_seconds) if figures.pushed else ended_at
            push = tracer.child(whole, "kv_push", kind=SpanKind.CLIENT, started_at=pushed_at)
            push.set_attributes(
                {
                    "outrider.connector": figures.connector,
                    "outrider.kv_bytes": figures.kv_bytes,
                    "outrider.exposed_seconds": figures.exposed_seconds,
                }
            )
            push.end(ended_at)
        whole.end(ended_at)
