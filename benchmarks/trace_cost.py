"""What traces cost a router for each request: `python benchmarks/trace_cost.py`.

A timeline as one plain request leaves it (five spans) is recorded again and again, with tracing off, with a caller that
does not sample, and sampled, sent to a collector in another process. `event loop` is what a request waits for at most;
`processor` is the time of all threads, the exporter's included.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from outrider.request import Request, RequestOptions, SamplingParams
from outrider.service.telemetry.otel_tracer import OtelTracer
from outrider.service.telemetry.tracing import NO_TRACER, Tracer, traceparent_of
from router.observe.timeline import SpanKind
from router.observe.timelines import Timelines
from router.observe.trace_spans import request_attributes

COLLECTOR = """
import sys
from tests.support.traces import Collector
with Collector() as collector:
    print(collector.endpoint, flush=True)
    sys.stdin.read()
"""
SAMPLED = (("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),)
NOT_SAMPLED = (("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00"),)
REQUEST = Request(
    request_id="a-request",
    prompt_token_ids=(1, 2, 3),
    options=RequestOptions(sampling=SamplingParams(seed=1, max_tokens=64)),
)
REQUESTS = 400
"""Of a round: what one batch of the exporter takes in two, so that nothing is dropped."""
ROUNDS = 15


def serve_one(timelines: Timelines, tracer: Tracer, metadata: tuple[tuple[str, str], ...]) -> None:
    """What tracing adds to a request, and the timeline itself, which is there without it."""
    tracer.enter(metadata)
    timeline = timelines.begin("a-request")
    if timeline.traced.is_recording():
        timeline.traced.set_attributes(request_attributes(REQUEST, model="m"))
    timeline.begin(SpanKind.ENCODE).close()
    timeline.begin(SpanKind.QUEUE).close()
    attempt = timeline.begin_attempt("decode-0")
    opened = timeline.begin(SpanKind.OPEN, node="decode-0", attempt=0)
    prefill = timeline.begin(SpanKind.PREFILL, node="prefill-0", attempt=0)
    prefill.num_tokens = 240
    timeline.show(prefill, attempt)
    for span in (attempt, prefill.traced):
        assert bool(traceparent_of(span)) is timeline.traced.is_recording()
    prefill.close()
    opened.close()
    timelines.end(timeline, None)


def measure(tracer: Tracer, metadata: tuple[tuple[str, str], ...]) -> tuple[float, float]:
    """(event loop, processor) in microseconds for one request, medians of the rounds."""
    timelines = Timelines(256, tracer=tracer)
    walls, processors = [], []
    for _ in range(ROUNDS):
        wall, processor = time.perf_counter(), time.process_time()
        for _ in range(REQUESTS):
            serve_one(timelines, tracer, metadata)
        walls.append((time.perf_counter() - wall) / REQUESTS * 1e6)
        if isinstance(tracer, OtelTracer):
            tracer._provider.force_flush()  # noqa: SLF001 what is sent later is the round's all the same
        processors.append((time.process_time() - processor) / REQUESTS * 1e6)
    return statistics.median(walls), statistics.median(processors)


def main() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", COLLECTOR],
        cwd=Path(__file__).resolve().parents[1],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as collector:
        assert collector.stdout is not None
        tracer = OtelTracer(collector.stdout.readline().strip(), role="router")
        tracer.start("router-0")
        print(f"{'':>14}  event loop  processor   (microseconds a request, timeline included)")
        for name, used, metadata in (
            ("off", NO_TRACER, SAMPLED),
            ("not sampled", tracer, NOT_SAMPLED),
            ("sampled", tracer, SAMPLED),
        ):
            wall, processor = measure(used, metadata)
            print(f"{name:>14}  {wall:10.1f}  {processor:9.1f}")
        tracer.stop(5.0)
        assert collector.stdin is not None
        collector.stdin.close()


if __name__ == "__main__":
    main()
