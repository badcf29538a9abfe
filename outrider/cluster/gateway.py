"""`python -m outrider.cluster.gateway`: serves OpenAI's API over HTTP with the SMG gateway, in front of routers.

The gateway runs in this process and handles its signals: after SIGTERM, answers in progress may end during the drain. A
thread announces when the gateway can answer.
"""

from __future__ import annotations

import asyncio
import http.client
import importlib
import importlib.util
import json
import math
import os
import secrets
import socket
import sys
import threading
import time
import urllib.request
from dataclasses import dataclass, field

from outrider.cluster.adapter_doors import AdapterDoors
from outrider.config.arguments import parse_role_arguments
from outrider.errors import ConfigError
from outrider.extras import install_command
from outrider.lossy_stream import guard_standard_streams
from outrider.service.address import host_port, is_wildcard, loopback, reserve_port
from outrider.service.announce import announce, announce_uncaught_errors
from outrider.service.config import NO_PARSER, GatewayConfig, ServerConfig, TelemetryConfig
from outrider.service.security import warn_if_unauthenticated
from outrider.service.server import probe_port
from outrider.service.telemetry.logging import configure_logging, get_logger

MODULE = "outrider.cluster.gateway"
TICK_SECONDS = 0.1
PROBE_SECONDS = 2.0
MAX_BODY_BYTES = 16 * 1024 * 1024
"""Maximum size of an HTTP request in bytes. A router accepts only 2 MiB, but it receives token ids, which need less
space than their text.
"""
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9"}
"""The gateway's environment. For a tokenizer that is not on its machine, the gateway asks a model hub before it asks
the router. This hub never answers, since nothing listens on the discard port.
"""

_log = get_logger("gateway")


def main() -> int:
    """Returns 0 after a signal, or 1 if the gateway cannot start."""
    guard_standard_streams()
    sections = parse_role_arguments(
        MODULE, {"server": ServerConfig, "telemetry": TelemetryConfig, "gateway": GatewayConfig}
    )
    server: ServerConfig = sections["server"]
    telemetry: TelemetryConfig = sections["telemetry"]
    config: GatewayConfig = sections["gateway"]
    configure_logging(telemetry, role="gateway")
    announce_uncaught_errors()
    require_gateway()
    if not config.router_targets:
        raise ConfigError("gateway.router_targets is empty: name the routers, host:port")
    ports = choose_ports(server)
    arguments = gateway_arguments(config, telemetry, ports, server.drain_seconds)
    warn_if_unauthenticated(
        server.host, what="the OpenAI API", is_protected=bool(config.key_file), fix="set gateway.key_file"
    )
    if telemetry.otlp_endpoint and not may_trace(telemetry):
        _log.warning("the gateway exports no traces: it supports only http:// endpoints", key="telemetry.otlp_endpoint")
    os.environ.update(ENVIRONMENT)
    threading.Thread(target=_accompany, args=(ports, server.drain_seconds, config), daemon=True).start()
    from smg.launch_router import launch_router, parse_router_args

    launch_router(parse_router_args(arguments))
    return 0


def _accompany(ports: GatewayPorts, drain_seconds: float, config: GatewayConfig) -> None:
    """Announces the gateway's addresses at once and, as soon as it can answer, that it is serving; then opens doors to
    the routers' adapters.
    """
    address = host_port(ports.host, ports.port)
    metrics_address = host_port(ports.metrics_host, ports.metrics_port)
    where = {"role": MODULE, "address": address, "metrics_address": metrics_address, "pid": os.getpid()}
    announce(**where, drain_seconds=drain_seconds)
    while (model := served_model(ports)) is None:
        time.sleep(TICK_SECONDS)
    _log.info("serving", address=address, metrics_address=metrics_address, model=model)
    announce(**where, serving=True, model=model)
    asyncio.run(AdapterDoors(config.router_targets, ports.url, ports.control_key).run())


def choose_ports(server: ServerConfig) -> GatewayPorts:
    """Reserves the configured ports, or free ones. Metrics are served on loopback only, unless their port is set.

    Raises: ConfigError if a configured port is taken.
    """
    metrics_host = loopback() if server.metrics_port is None else server.host
    taken = "choose another with --set server.{}=N, or --openai N of `outrider up`"
    if server.port:
        probe_port(server.host, server.port, taken.format("port"))
    if server.metrics_port:
        probe_port(metrics_host, server.metrics_port, "choose another with --set server.metrics_port=N")
    serving = reserve_port(server.host, server.port or 0)
    metrics = reserve_port(metrics_host, server.metrics_port or 0)
    return GatewayPorts(
        host=server.host, port=serving.getsockname()[1],
        metrics_host=metrics_host, metrics_port=metrics.getsockname()[1],
        reserved=(serving, metrics),
    )  # fmt: skip


def served_model(ports: GatewayPorts) -> str | None:
    """Returns the model's name for clients, or None until the gateway has a healthy router and its tokenizer."""
    ask = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
    try:
        ask(f"{ports.url}/readiness", timeout=PROBE_SECONDS).close()
        with ask(f"{ports.url}/v1/models", timeout=PROBE_SECONDS) as answer:
            models = json.load(answer)["data"]
    except (OSError, http.client.HTTPException, ValueError, KeyError):  # it is not listening yet, or answers otherwise
        return None
    return str(models[0]["id"]) if models else None


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayPorts:
    """The addresses of a gateway. Both ports are known before it starts, because smg cannot choose free ones.

    `control_key` may add and remove engines. Nobody else is told this key.
    """

    host: str
    port: int
    metrics_host: str
    metrics_port: int
    control_key: str = field(default_factory=secrets.token_hex, repr=False)
    reserved: tuple[socket.socket, ...] = field(default=(), repr=False)  # bound to both ports until smg listens

    @property
    def url(self) -> str:
        """The gateway's URL on this machine."""
        return f"http://{host_port(loopback() if is_wildcard(self.host) else self.host, self.port)}"


def require_engine_protocol() -> None:
    """Checks that the protocol between the gateway and routers can be imported. Raises: ConfigError otherwise."""
    try:
        _ = importlib.import_module("smg_grpc_proto").vllm_engine_pb2_grpc  # the attribute is imported on first use
    except Exception as error:  # the package is missing, or incompatible with the installed protobuf and grpc
        raise ConfigError(
            f"smg-grpc-proto cannot be imported ({error}); {install_command('openai')} brings it"
        ) from error


def require_gateway() -> None:
    """Checks that smg is installed. Raises: ConfigError otherwise."""
    if importlib.util.find_spec("smg") is None:
        raise ConfigError(f"the OpenAI API needs the SMG gateway, which is not installed: {install_command('openai')}")


def may_trace(telemetry: TelemetryConfig) -> bool:
    """Returns whether the gateway can export traces. Its exporter has no TLS, so with https:// smg would not start."""
    return telemetry.otlp_endpoint.startswith("http://")


def gateway_arguments(
    config: GatewayConfig, telemetry: TelemetryConfig, ports: GatewayPorts, drain_seconds: float
) -> list[str]:
    """Returns smg's arguments for a gateway in front of `config.router_targets`.

    The comments say what smg would do without an argument.

    Raises: ConfigError if the key file cannot be read or has no keys.
    """
    flags = ["--host", ports.host, "--port", str(ports.port)]
    flags += ["--prometheus-host", ports.metrics_host, "--prometheus-port", str(ports.metrics_port)]
    flags += ["--worker-urls", *(f"grpc://{target}" for target in config.router_targets)]
    flags += ["--policy", "round_robin"]  # routers themselves place requests by load and cached prefix
    flags += ["--disable-retries"]  # smg would report overload only after five tries; routers retry by themselves
    flags += ["--disable-circuit-breaker"]  # after ten failures, smg would reject everything for a minute
    # After a lost router is back, smg would not use it again for up to two minutes.
    flags += ["--health-check-interval-secs", "1", "--health-success-threshold", "1"]
    flags += ["--health-check-timeout-secs", "2"]
    flags += ["--worker-startup-check-interval", "1"]  # smg would find a router that starts later only after 30 s
    flags += ["--shutdown-grace-period-secs", str(math.ceil(drain_seconds))]
    flags += ["--max-payload-size", str(MAX_BODY_BYTES)]
    # Without a key, every caller could administer the gateway (add workers, flush caches).
    flags += ["--control-plane-api-keys", f"outrider:outrider:admin:{ports.control_key}"]
    if config.tool_call_parser:
        flags += ["--tool-call-parser", config.tool_call_parser]
    flags += ["--reasoning-parser", config.reasoning_parser or NO_PARSER]  # smg would choose one by model
    # smg would take a request's id from the client, but routers tell completions from chats by the form of the id.
    flags += ["--request-id-headers", "x-outrider-request-id"]
    for number, key in enumerate(_read_keys(config)):
        flags += ["--tenant-api-key", f"client-{number}:{key}"]  # a key in --api-key could also administer smg
    traces = telemetry.otlp_endpoint if may_trace(telemetry) else ""
    if traces:
        flags += ["--enable-trace", "--otlp-traces-endpoint", traces]
    is_verbose = telemetry.log_level == "debug" or bool(traces)  # at "warn", smg makes no spans
    flags += ["--log-level", "info" if is_verbose else "warn"]  # "info" logs two lines per request
    flags += [] if telemetry.log_format == "text" else ["--log-json"]
    return [*flags, *config.extra_arguments]


def _read_keys(config: GatewayConfig) -> list[str]:
    """Reads the keys in `key_file`. Raises: ConfigError, also for a file without keys, which would let everyone in."""
    if config.key_file is None:
        return []
    try:
        keys = config.key_file.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"gateway.key_file cannot be read: {error}") from error
    if not keys:
        raise ConfigError(f"gateway.key_file {config.key_file} has no key")
    return keys


if __name__ == "__main__":
    sys.exit(main())
