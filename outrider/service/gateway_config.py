"""Settings of the OpenAI gateway, which routers read as well: they answer as its parsers expect."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider.config.settings import setting

NO_PARSER = "passthrough"
"""The gateway's parser that leaves thoughts in the text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """Section `gateway`: OpenAI's API over HTTP, by the SMG gateway. Its names of parsers: `smg launch --help`."""

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
    cors_allowed_origins: tuple[str, ...] = setting(
        (), help="Origins whose web pages may ask, such as http://localhost:3000; `*`: all."
    )
    extra_arguments: tuple[str, ...] = setting(
        (), help="More arguments of `smg launch`, such as --model-alias=gpt-4=NAME; they come last."
    )
