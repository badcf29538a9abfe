"""`python -m outrider.cluster.gateway`: OpenAI's API over HTTP, by the SMG gateway in front of routers.

Supervises one `smg` process: announces when it can answer, passes SIGTERM on and ends it when its drain is over, ends
when it dies. The kernel kills smg if this process is killed.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from outrider.cluster.config import GatewayConfig
from outrider.cluster.gateway_command import (
    GatewayPorts,
    gateway_command,
    gateway_environment,
    require_gateway,
)
from outrider.config import parse_role_arguments
from outrider.errors import ConfigError
from outrider.parent_death import die_with_parent
from outrider.service.address import is_wildcard
from outrider.service.announce import Announcer
from outrider.service.config import ServerConfig, TelemetryConfig
from outrider.service.security import warn_if_exposed
from outrider.service.server import probe_port
from outrider.service.telemetry.logging import configure_logging, get_logger

MODULE = "outrider.cluster.gateway"
LAUNCHER = Path(__file__).with_name("launcher.py")
LOOPBACK = "127.0.0.1"
TICK_SECONDS = 0.1
PROBE_SECONDS = 2.0
KILL_SECONDS = 0.5
"""From the end of the drain to SIGKILL."""

_log = get_logger("gateway")


def main() -> int:
    """0 after a signal; 1 when the gateway cannot start, or ends by itself."""
    die_with_parent()
    sections = parse_role_arguments(
        MODULE, {"server": ServerConfig, "telemetry": TelemetryConfig, "gateway": GatewayConfig}
    )
    server: ServerConfig = sections["server"]
    telemetry: TelemetryConfig = sections["telemetry"]
    config: GatewayConfig = sections["gateway"]
    configure_logging(telemetry, role="gateway")
    signals: queue.SimpleQueue[int] = queue.SimpleQueue()  # whose put may interrupt its own get
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _frame: signals.put(number))
    try:
        require_gateway()
        if not config.router_targets:
            raise ConfigError("gateway.router_targets is empty: name the routers, host:port")
        ports = choose_ports(server)
    except ConfigError as error:
        _log.error("cannot start", error=str(error))
        return 1
    warn_if_exposed(
        server.host, what="the OpenAI API", is_protected=False, fix="put a proxy that asks for credentials before it"
    )
    command = gateway_command(config, telemetry, ports, drain_seconds=server.drain_seconds)
    process = subprocess.Popen(  # noqa: S603 our own command
        [sys.executable, "-I", "-S", str(LAUNCHER), str(os.getpid()), *command],
        stdin=subprocess.DEVNULL,
        env=gateway_environment(os.environ),
    )
    try:
        return _supervise(process, ports, server.drain_seconds, signals)
    finally:
        process.kill()
        process.wait()


def _supervise(
    process: subprocess.Popen[bytes], ports: GatewayPorts, drain_seconds: float, signals: queue.SimpleQueue[int]
) -> int:
    address = f"{ports.host}:{ports.port}"
    metrics_address = f"{ports.metrics_host}:{ports.metrics_port}"
    where = {"role": MODULE, "address": address, "metrics_address": metrics_address, "pid": process.pid}
    announcer = Announcer.from_environment()
    announcer.say(**where, drain_seconds=drain_seconds + KILL_SECONDS)
    model = None
    while process.poll() is None:
        with contextlib.suppress(queue.Empty):
            signals.get(timeout=TICK_SECONDS)
            return _end(process, drain_seconds, signals)
        if model is None and (model := served_model(ports)) is not None:
            _log.info("serving", address=address, metrics_address=metrics_address, model=model)
            announcer.say(**where, serving=True, model=model)
    _log.error("the gateway ended", error=f"smg ended with status {process.returncode}; its last lines are above")
    return 1


def _end(process: subprocess.Popen[bytes], drain_seconds: float, signals: queue.SimpleQueue[int]) -> int:
    """Until smg has ended; at once with a second signal. Running answers may end during the drain."""
    process.terminate()
    deadline = time.monotonic() + drain_seconds + KILL_SECONDS
    while process.poll() is None and time.monotonic() < deadline and signals.empty():
        time.sleep(TICK_SECONDS)
    return 0


def choose_ports(server: ServerConfig) -> GatewayPorts:
    """Free ports for those that the settings leave open. Metrics are on loopback unless they have a port.

    Raises: ConfigError when a port that the settings name is taken.
    """
    metrics_host = LOOPBACK if server.metrics_port is None else server.host
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
    host = LOOPBACK if is_wildcard(ports.host) else ports.host
    connection = http.client.HTTPConnection(host, ports.port, timeout=PROBE_SECONDS)
    try:
        connection.request("GET", "/readiness")
        answer = connection.getresponse()
        answer.read()
        if answer.status != http.HTTPStatus.OK:
            return None
        connection.request("GET", "/v1/models")
        models = json.load(connection.getresponse())["data"]
    except (OSError, http.client.HTTPException):  # it does not listen yet
        return None
    finally:
        connection.close()
    return str(models[0]["id"]) if models else None


if __name__ == "__main__":
    sys.exit(main())
