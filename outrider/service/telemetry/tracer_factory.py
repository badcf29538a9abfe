"""Makes the tracer that the settings select."""

from __future__ import annotations

from urllib.parse import urlsplit

from outrider.errors import ConfigError
from outrider.extras import install_command
from outrider.service.config import TelemetryConfig
from outrider.service.telemetry.tracing import NO_TRACER, Tracer

KEY = "telemetry.otlp_endpoint"


def make_tracer(config: TelemetryConfig, *, role: str) -> Tracer:
    """Returns the tracer; OpenTelemetry is imported only if an endpoint is set. Raises: ConfigError."""
    if not config.otlp_endpoint:
        return NO_TRACER
    _check(config.otlp_endpoint)
    try:
        from outrider.service.telemetry.otel_tracer import OtelTracer
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "opentelemetry":
            raise
        raise ConfigError(f"{KEY} needs OpenTelemetry: {install_command('otel')} brings it") from error
    return OtelTracer(config.otlp_endpoint, role=role)


def _check(endpoint: str) -> None:
    """Checks the endpoint. Raises: ConfigError, which does not repeat parts that may contain a password."""
    try:
        parts = urlsplit(endpoint)
        has_port = bool(parts.port)
    except ValueError:
        is_valid = False
    else:
        is_address = parts.scheme in {"http", "https"} and bool(parts.hostname) and has_port and "@" not in parts.netloc
        is_valid = is_address and parts.path in {"", "/"} and not parts.query and not parts.fragment
    if not is_valid:
        raise ConfigError(
            f"{KEY} must be http://host:port (plaintext) or https://host:port (TLS), where a collector takes OTLP over "
            "gRPC, usually on port 4317; without a path, name or password: OTEL_EXPORTER_OTLP_HEADERS has those"
        )
