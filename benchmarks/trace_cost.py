"""Measures the cost of traces to a router per request: `python benchmarks/trace_cost.py`.

It records one plain request (five spans) repeatedly: with tracing off, for a caller that does not sample, and
for one that does, with export to a collector in another process. `event loop` is the wall time that recording takes on
the event loop, which is the most that it can delay a request; `processor` is the CPU time of all threads, including
the exporter's.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from prometheus_client import CollectorRegistry

from outrider.node_stamp import NodeVersion
from outrider.prefill import PrefillFigures
from outrider.request import Request, RequestOptions, SamplingParams
from outrider.service.telemetry.metrics import RouterMetrics
from outrider.service.telemetry.otel_tracer import OtelTracer
from outrider.service.telemetry.tracing import NO_TRACER, Tracer, traceparent_of
from router.observe.records import Records
from router.observe.spans import SpanKind

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
METRICS = RouterMetrics(model_name="m", registry=CollectorRegistry())
DECODE_NODE = SimpleNamespace(name="decode-0", stamp=NodeVersion("decode-0", "decode", "1", "exact"))
PREFILL_NODE = SimpleNamespace(name="prefill-0", stamp=NodeVersion("prefill-0", "prefill", "1", "exact"))
PREFILLED = PrefillFigures(num_computed_tokens=240)
REQUESTS = 400
"""Requests per round. The exporter takes them in two batches, so that no span is dropped."""
ROUNDS = 15


def serve_one(records: Records, tracer: Tracer, metadata: tuple[tuple[str, str], ...]) -> None:
    """Traces one request and makes its record, which is made without tracing, too."""
    tracer.enter(metadata)
    record = records.begin("a-request", METRICS)
    record.take_request(REQUEST, model="m")
    record.begin_span(SpanKind.ENCODE).close()
    record.begin_span(SpanKind.QUEUE).close()
    attempt = record.begin_attempt(DECODE_NODE, num_known_tokens=240)
    attempt.ask()
    prefill = attempt.begin_prefill(PREFILL_NODE)
    for span in (attempt.traced, prefill.traced):
        assert bool(traceparent_of(span)) is record.traced.is_recording()
    attempt.end_prefill(prefill, PREFILLED)
    attempt.end("")
    records.end(record, None)


def measure(tracer: Tracer, metadata: tuple[tuple[str, str], ...]) -> tuple[float, float]:
    """Returns (event loop, processor): microseconds per request, as medians of the rounds."""
    records = Records(256, tracer=tracer)
    walls, processors = [], []
    for _ in range(ROUNDS):
        wall, processor = time.perf_counter(), time.process_time()
        for _ in range(REQUESTS):
            serve_one(records, tracer, metadata)
        walls.append((time.perf_counter() - wall) / REQUESTS * 1e6)
        if isinstance(tracer, OtelTracer):
            tracer._provider.force_flush()  # noqa: SLF001 later exports belong to the round, too
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
        print(f"{'':>14}  event loop  processor   (microseconds a request, record included)")
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
