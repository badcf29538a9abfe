"""Settings of all roles, and settings of the OpenAI gateway, some of which routers read too."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider.config.settings import setting
from outrider.rpc.tls import SecurityConfig

ROUTER_PORT = 50051
NO_PARSER = "passthrough"
"""Name of the gateway's parser that leaves reasoning in the text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Section `server`: the address of a process, its limits, and how long it drains."""

    host: str = setting("127.0.0.1", help="Address to bind. 0.0.0.0: all network interfaces.")
    port: int | None = setting(
        None,
        at_least=0,
        at_most=65535,
        help="Port to bind. 0: the system chooses. Default: 50051 for a router, 0 for a node.",
    )
    advertise_address: str = setting(
        "",
        help="Address (host[:port]) at which other processes reach this service. Empty: the bound address, or this "
        "machine's address.",
    )
    name: str = setting("", help="Name of the process, unique in the cluster. Empty: its role and address.")
    metrics_port: int | None = setting(
        None,
        at_least=0,
        at_most=65535,
        help="HTTP port for Prometheus metrics and, on a router, the status page. 0: the system chooses. null: no "
        "port.",
    )
    drain_seconds: float = setting(
        6.0,
        at_least=0,
        at_most=86_400,
        help="Seconds that running requests may continue after SIGTERM. The shutdown takes 3 more seconds.",
    )
    max_concurrent_rpcs: int = setting(
        4096,
        at_least=16,
        at_most=1_000_000,
        help="Maximum number of concurrent calls. More calls get RESOURCE_EXHAUSTED. Health probes and Abort do not "
        "count.",
    )
    max_connection_age_seconds: float | None = setting(
        None,
        at_least=1,
        at_most=86_400,
        help="Age in seconds at which clients are asked to reconnect, so that they also use routers that were added "
        "later. Running streams are not interrupted. null: never.",
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "host", self.host.strip("[]"))  # an IPv6 address may be in brackets

    def port_of(self, role: str) -> int:
        """Returns the configured port, or the role's default."""
        if self.port is not None:
            return self.port
        return ROUTER_PORT if role == "router" else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryConfig:
    """Section `telemetry`: logs and traces."""

    log_level: str = setting(
        "info", choices=("debug", "info", "warning", "error"), help="Minimum severity of the messages that are logged."
    )
    log_format: str = setting(
        "auto",
        choices=("auto", "json", "text"),
        help="Format of log messages: one JSON object or one line of text per event. auto: text on a terminal, JSON "
        "elsewhere.",
    )
    log_text: bool = setting(
        False, help="Whether prompts and answers may appear in logs and on the router's status page."
    )
    otlp_endpoint: str = setting(
        "",
        help="Collector of traces, by OTLP over gRPC: http://host:4317, or https:// for TLS. Empty: no traces.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """Section `gateway`: OpenAI's API over HTTP, served by the SMG gateway. `smg launch --help` lists its parsers."""

    router_targets: tuple[str, ...] = setting((), help="Addresses (host:port) of the routers.")
    tool_call_parser: str = setting(
        "json",
        help="Format of tool calls in the model's text, if the model may choose to call a tool: `json`, `qwen`, "
        "`llama`, `mistral` and others. Empty: the gateway chooses by the model's name.",
    )
    reasoning_parser: str = setting(
        "",
        help="Format that separates reasoning from the answer: `qwen3`, `deepseek_r1` and others. Empty: reasoning "
        "stays in the text. Routers read this setting too.",
    )
    key_file: Path | None = setting(
        None,
        help="File of API keys, one per line. Clients must send one of them (`Authorization: Bearer KEY`). null: "
        "clients need no key.",
    )
    extra_arguments: tuple[str, ...] = setting(
        (),
        help="Further arguments of `smg launch`, for example --model-alias=gpt-4=NAME, or --cors-allowed-origins "
        "and http://localhost:3000 for web pages. They are added last.",
    )


SERVICE_SECTIONS = {"server": ServerConfig, "telemetry": TelemetryConfig, "security": SecurityConfig}
"""The sections that every service reads."""
