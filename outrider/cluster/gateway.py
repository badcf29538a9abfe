"""`python -m outrider.cluster.gateway`: OpenAI's API over HTTP, by the SMG gateway in front of routers.

The gateway runs in this process, and takes its signals: after SIGTERM running answers may end during the drain. A
thread announces when it can answer.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import sys
import threading
import time
import urllib.request

from outrider.cluster.gateway_arguments import ENVIRONMENT, GatewayPorts, gateway_arguments, may_trace, require_gateway
from outrider.config.arguments import parse_role_arguments
from outrider.errors import ConfigError
from outrider.lossy_stream import guard_standard_streams
from outrider.service.address import host_port, is_wildcard, loopback
from outrider.service.announce import announce, announce_uncaught_errors
from outrider.service.config import ServerConfig, TelemetryConfig
from outrider.service.gateway_config import GatewayConfig
from outrider.service.security import warn_if_exposed
from outrider.service.server import probe_port
from outrider.service.telemetry.logging import configure_logging, get_logger

MODULE = "outrider.cluster.gateway"
TICK_SECONDS = 0.1
PROBE_SECONDS = 2.0

_log = get_logger("gateway")


def main() -> int:
    """0 after a signal; 1 when the gateway cannot start."""
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
    warn_if_exposed(server.host, what="the OpenAI API", is_protected=bool(config.key_file), fix="set gateway.key_file")
    if telemetry.otlp_endpoint and not may_trace(telemetry):
        _log.warning("the gateway does not trace: it sends traces to http:// only", key="telemetry.otlp_endpoint")
    os.environ.update(ENVIRONMENT)
    threading.Thread(target=_announce, args=(ports, server.drain_seconds), daemon=True).start()
    from smg.launch_router import launch_router, parse_router_args

    launch_router(parse_router_args(arguments))
    return 0


def _announce(ports: GatewayPorts, drain_seconds: float) -> None:
    """Where the gateway listens, and when it can answer."""
    address = host_port(ports.host, ports.port)
    metrics_address = host_port(ports.metrics_host, ports.metrics_port)
    where = {"role": MODULE, "address": address, "metrics_address": metrics_address, "pid": os.getpid()}
    announce(**where, drain_seconds=drain_seconds)
    while (model := served_model(ports)) is None:
        time.sleep(TICK_SECONDS)
    _log.info("serving", address=address, metrics_address=metrics_address, model=model)
    announce(**where, serving=True, model=model)


def choose_ports(server: ServerConfig) -> GatewayPorts:
    """Free ports for those that the settings leave open. Metrics are on loopback unless they have a port.

    Raises: ConfigError when a port that the settings name is taken.
    """
    metrics_host = loopback() if server.metrics_port is None else server.host
    taken = "choose another with --set server.{}=N, or --openai N of `outrider up`"
    if server.port:
        probe_port(server.host, server.port, taken.format("port"))
    if server.metrics_port:
        probe_port(metrics_host, server.metrics_port, "choose another with --set server.metrics_port=N")
    return GatewayPorts(
        host=server.host,
        port=server.port or _free_port(server.host),
        metrics_host=metrics_host,
        metrics_port=server.metrics_port or _free_port(metrics_host),
    )


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def served_model(ports: GatewayPorts) -> str | None:
    """The model's name as clients give it, once the gateway has a healthy router and its tokenizer; else None."""
    url = f"http://{host_port(loopback() if is_wildcard(ports.host) else ports.host, ports.port)}"
    ask = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
    try:
        ask(f"{url}/readiness", timeout=PROBE_SECONDS).close()
        with ask(f"{url}/v1/models", timeout=PROBE_SECONDS) as answer:
            models = json.load(answer)["data"]
    except (OSError, http.client.HTTPException):  # it does not listen yet, or answers with an error
        return None
    return str(models[0]["id"]) if models else None


if __name__ == "__main__":
    sys.exit(main())
