"""Arguments and environment of `smg launch`, the gateway that serves OpenAI's API over HTTP."""

from __future__ import annotations

import importlib.util
import math
import secrets
from dataclasses import dataclass

from outrider.errors import ConfigError
from outrider.extras import install_command
from outrider.service.config import TelemetryConfig
from outrider.service.gateway_config import NO_PARSER, GatewayConfig

MAX_BODY_BYTES = 16 * 1024 * 1024
"""Largest HTTP request. Routers take 2 MiB by default, in which token ids need less room than their text."""
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9"}
"""The gateway asks a hub for a tokenizer that is not on its machine, before it asks the router: it finds none, since
nothing listens there (the discard port).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayPorts:
    """Where a gateway listens. Both ports are known before it starts: smg chooses none by itself."""

    host: str
    port: int
    metrics_host: str
    metrics_port: int


def require_gateway() -> None:
    """Raises: ConfigError when smg is not installed."""
    if importlib.util.find_spec("smg") is None:
        raise ConfigError(f"the OpenAI API needs the SMG gateway, which is not installed: {install_command('openai')}")


def may_trace(telemetry: TelemetryConfig) -> bool:
    """The gateway's exporter is built without TLS: with https:// it would not start."""
    return telemetry.otlp_endpoint.startswith("http://")


def gateway_arguments(
    config: GatewayConfig, telemetry: TelemetryConfig, ports: GatewayPorts, drain_seconds: float
) -> list[str]:
    """In front of `config.router_targets`. Comments say what would happen with its defaults.

    Raises: ConfigError for keys that cannot be read.
    """
    flags = ["--host", ports.host, "--port", str(ports.port)]
    flags += ["--prometheus-host", ports.metrics_host, "--prometheus-port", str(ports.metrics_port)]
    flags += ["--worker-urls", *(f"grpc://{target}" for target in config.router_targets)]
    flags += ["--policy", "round_robin"]  # routers place by load and cached prefix themselves
    flags += ["--disable-retries"]  # overload would be told after five tries; routers retry what can be retried
    flags += ["--disable-circuit-breaker"]  # ten failures would refuse everything for a minute
    # A router that was away would be back after up to two minutes.
    flags += ["--health-check-interval-secs", "1", "--health-success-threshold", "1"]
    flags += ["--health-check-timeout-secs", "2"]
    flags += ["--worker-startup-check-interval", "1"]  # a router that starts later would be seen after 30 s
    flags += ["--shutdown-grace-period-secs", str(math.ceil(drain_seconds))]
    flags += ["--max-payload-size", str(MAX_BODY_BYTES)]
    # Adding workers, flushing caches and the like would be open to every caller: this key is told to nobody.
    flags += ["--control-plane-api-keys", f"outrider:outrider:admin:{secrets.token_hex(16)}"]
    if config.tool_call_parser:
        flags += ["--tool-call-parser", config.tool_call_parser]
    flags += ["--reasoning-parser", config.reasoning_parser or NO_PARSER]  # by the model's name, unknown to routers
    # A client's own id would be the request's, by whose form routers tell completions from chats.
    flags += ["--request-id-headers", "x-outrider-request-id"]
    if config.cors_allowed_origins:
        flags += ["--cors-allowed-origins", *config.cors_allowed_origins]
    for number, key in enumerate(_read_keys(config)):
        flags += ["--tenant-api-key", f"client-{number}:{key}"]  # --api-key would open the administration as well
    traces = telemetry.otlp_endpoint if may_trace(telemetry) else ""
    if traces:
        flags += ["--enable-trace", "--otlp-traces-endpoint", traces]
    is_verbose = telemetry.log_level == "debug" or bool(traces)  # below "info" it makes no spans
    flags += ["--log-level", "info" if is_verbose else "warn"]  # info: two lines a request
    flags += [] if telemetry.log_format == "text" else ["--log-json"]
    return [*flags, *config.extra_arguments]


def _read_keys(config: GatewayConfig) -> list[str]:
    """Of `key_file`. Raises: ConfigError, also for a file without a key, which would ask nobody."""
    if config.key_file is None:
        return []
    try:
        keys = config.key_file.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"gateway.key_file cannot be read: {error}") from error
    if not keys:
        raise ConfigError(f"gateway.key_file {config.key_file} has no key")
    return keys
