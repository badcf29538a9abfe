"""Settings that every role has, and those of the OpenAI gateway, some of which routers read too."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider.config.settings import setting
from outrider.rpc.tls import SecurityConfig

ROUTER_PORT = 50051
NO_PARSER = "passthrough"
"""The gateway's parser that leaves thoughts in the text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Section `server`: the address of a process, its limits, and how long it drains."""

    host: str = setting("127.0.0.1", help="Address to bind; 0.0.0.0 for every network card.")
    port: int | None = setting(
        None,
        at_least=0,
        at_most=65535,
        help="Port to bind; 0: the system chooses. By default 50051 for a router and 0 for a node.",
    )
    advertise_address: str = setting(
        "", help="host[:port] under which others reach this service; empty: what is bound, or this machine's address."
    )
    name: str = setting("", help="Unique in the cluster; empty: role and address for others.")
    metrics_port: int | None = setting(
        None,
        at_least=0,
        at_most=65535,
        help="Prometheus over HTTP on this port, and on a router its page; 0: the system chooses; null: off.",
    )
    drain_seconds: float = setting(
        6.0, at_least=0, at_most=86_400, help="How long running work may go on after SIGTERM; the end takes 3 s more."
    )
    max_concurrent_rpcs: int = setting(
        4096,
        at_least=16,
        at_most=1_000_000,
        help="Calls at a time; beyond: RESOURCE_EXHAUSTED. Probes and Abort are not counted.",
    )
    max_connection_age_seconds: float | None = setting(
        None,
        at_least=1,
        at_most=86_400,
        help="After so long a client is asked to connect again, so that clients spread over routers that were added; "
        "running streams are not cut. null: never.",
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "host", self.host.strip("[]"))  # brackets around an IPv6 address

    def port_of(self, role: str) -> int:
        """Returns the configured port, or the role's default."""
        if self.port is not None:
            return self.port
        return ROUTER_PORT if role == "router" else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryConfig:
    """Section `telemetry`: what is logged, and how."""

    log_level: str = setting("info", choices=("debug", "info", "warning", "error"), help="Least severity logged.")
    log_format: str = setting(
        "auto",
        choices=("auto", "json", "text"),
        help="One JSON object or one line of text per event; auto: text on a terminal.",
    )
    log_text: bool = setting(False, help="Whether prompts and answers may be logged, and shown on the router's page.")
    otlp_endpoint: str = setting(
        "",
        help="Where traces go, by OTLP over gRPC: http://host:4317, or https:// for TLS; empty: off.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """Section `gateway`: OpenAI's API over HTTP, served by the SMG gateway. `smg launch --help` lists its parsers."""

    router_targets: tuple[str, ...] = setting((), help="Addresses of routers (host:port).")
    tool_call_parser: str = setting(
        "json",
        help="How tool calls are found in a model's text where it may choose to call one: `json`, `qwen`, `llama`, "
        "`mistral` and others; empty: by the model's name.",
    )
    reasoning_parser: str = setting(
        "",
        help="How thoughts are told from the answer: `qwen3`, `deepseek_r1` and others; empty: they stay in the text. "
        "Routers read it too.",
    )
    key_file: Path | None = setting(
        None,
        help="A file of keys, one a line. Clients must show one (`Authorization: Bearer KEY`); null: nobody is asked.",
    )
    extra_arguments: tuple[str, ...] = setting(
        (),
        help="More arguments of `smg launch`, such as --model-alias=gpt-4=NAME, or --cors-allowed-origins and "
        "http://localhost:3000 for web pages. They come last.",
    )


SERVICE_SECTIONS = {"server": ServerConfig, "telemetry": TelemetryConfig, "security": SecurityConfig}
"""The sections that every service reads."""
