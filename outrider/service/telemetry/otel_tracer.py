"""Spans by OpenTelemetry's SDK: sampled, batched and sent by a thread of its own, which drops what it cannot deliver.

The SDK reads OpenTelemetry's standard environment variables; what is not one of those is here.
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
"""Between two log lines about traces: a collector that is away fails every few seconds."""

_log = get_logger("tracing")


class OtelTracer(Tracer):
    """Spans go to `endpoint` by OTLP over gRPC."""

    def __init__(self, endpoint: str, *, role: str) -> None:
        """`endpoint`: http://host:port in plaintext, https://host:port with TLS."""
        self._endpoint = endpoint
        self._role = role
        self._exporter: OTLPSpanExporter | None = None  # until `start`

    def start(self, instance: str) -> None:
        complaints = logging.getLogger("opentelemetry")
        complaints.handlers[:] = [_Complaints()]
        complaints.propagate = False
        self._exporter = OTLPSpanExporter(endpoint=self._endpoint)
        named = Resource.create(
            {
                "service.name": f"outrider-{self._role}",
                "service.instance.id": instance,
                "service.version": __version__,
            }
        )
        resource = named.merge(OTELResourceDetector().detect())  # what the operator says in the environment wins
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._spans = self._provider.get_tracer("outrider", __version__)

    def enter(self, metadata: Metadata | None) -> None:
        attach(caller_of_call(metadata))

    def stop(self, timeout_seconds: float) -> None:
        if self._exporter is None:
            return
        # By a thread that may be left behind: the SDK waits 30 s for a collector that does not answer.
        flush = threading.Thread(target=self._provider.shutdown, name="last traces", daemon=True)
        flush.start()
        flush.join(timeout_seconds)
        if flush.is_alive():
            self._exporter.shutdown()  # what is under way is given up


class _Complaints(logging.Handler):
    """OpenTelemetry's own log, as one line in `QUIET_SECONDS`."""

    _quiet_until = 0.0

    def __init__(self) -> None:
        super().__init__(level=logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        now = time.monotonic()
        if now >= self._quiet_until:
            self._quiet_until = now + QUIET_SECONDS
            _log.warning("traces may be lost", reason=record.getMessage())
