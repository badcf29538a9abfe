"""Spans made by OpenTelemetry's SDK, which samples, batches and exports them in its own thread and drops undeliverable
ones.

The SDK reads OpenTelemetry's standard environment variables; this module sets only what they do not cover.
"""

from __future__ import annotations

import logging
import threading
import time

from opentelemetry.context import attach
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from outrider import __version__
from outrider.service.telemetry.logging import get_logger
from outrider.service.telemetry.tracing import Metadata, Tracer, caller_of_call

QUIET_SECONDS = 60.0
"""Minimum seconds between two log lines about traces, because exports without a collector fail every few seconds."""

_log = get_logger("tracing")


class OtelTracer(Tracer):
    """Exports spans to `endpoint` by OTLP over gRPC."""

    def __init__(self, endpoint: str, *, role: str) -> None:
        """`endpoint` is http://host:port for plaintext or https://host:port for TLS."""
        self._endpoint = endpoint
        self._role = role
        self._exporter: OTLPSpanExporter | None = None  # None until `start` is called

    def start(self, instance: str) -> None:
        complaints = logging.getLogger("opentelemetry")
        complaints.handlers[:] = [_LogThrottle()]
        complaints.propagate = False
        self._exporter = OTLPSpanExporter(endpoint=self._endpoint)
        named = Resource.create(
            {
                "service.name": f"outrider-{self._role}",
                "service.instance.id": instance,
                "service.version": __version__,
            }
        )
        resource = named.merge(OTELResourceDetector().detect())  # the operator's environment variables take precedence
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._spans = self._provider.get_tracer("outrider", __version__)

    def enter(self, metadata: Metadata | None) -> None:
        attach(caller_of_call(metadata))

    def stop(self, timeout_seconds: float) -> None:
        if self._exporter is None:
            return
        # The shutdown runs in a thread that may be abandoned, since it waits 30 s for a collector that does not answer.
        flush = threading.Thread(target=self._provider.shutdown, name="last traces", daemon=True)
        flush.start()
        flush.join(timeout_seconds)
        if flush.is_alive():
            self._exporter.shutdown()  # abandons exports in flight


class _LogThrottle(logging.Handler):
    """Reduces OpenTelemetry's own log to one line per `QUIET_SECONDS`."""

    _quiet_until = 0.0

    def __init__(self) -> None:
        super().__init__(level=logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        now = time.monotonic()
        if now >= self._quiet_until:
            self._quiet_until = now + QUIET_SECONDS
            _log.warning("traces may be lost", reason=record.getMessage())
