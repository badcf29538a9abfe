"""`outrider config`: the settings in force, as YAML that can be used as a configuration file."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from outrider.cluster import ClusterConfig, GatewayConfig
from outrider.config import add_settings_arguments, format_value, load_config, to_plain
from outrider.rpc.peer_security import SecurityConfig
from outrider.service.config import ServerConfig, TelemetryConfig

ROLES = ("router", "prefill_node", "decode_node", "draft_node")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--role", choices=ROLES, help="only the settings of this service; default: all")
    add_settings_arguments(parser, os.environ)


def run(arguments: argparse.Namespace) -> int:
    resolved = load_config(
        sections_of(arguments.role), file=arguments.config, environ=os.environ, overrides=arguments.overrides
    )
    for name, section in resolved.sections.items():
        sys.stdout.write(f"{name}:\n")
        for line in _lines(to_plain(section), (name,), resolved.sources):
            sys.stdout.write(line + "\n")
    return 0


def sections_of(role: str | None) -> dict[str, type]:
    """The sections that a service reads; without a role, all."""
    from outrider.engine.kv_cache.config import KVCacheConfig
    from outrider.kv_transfer.config import KvTransferConfig
    from outrider.model_hub.config import ModelConfig

    sections: dict[str, type] = {}
    if role != "router":
        sections |= {"model": ModelConfig, "kv_cache": KVCacheConfig}
    if role in (None, "prefill_node", "decode_node"):
        sections["kv_transfer"] = KvTransferConfig
    sections["server"] = ServerConfig
    sections["telemetry"] = TelemetryConfig
    sections["security"] = SecurityConfig
    sections |= {name: _config_of(name) for name in (ROLES if role is None else (role,))}
    if role is None:
        sections |= {"cluster": ClusterConfig, "gateway": GatewayConfig}
    return sections


def _config_of(role: str) -> type:
    """Imported lazily: an install of the router lacks what nodes import."""
    match role:
        case "router":
            from router.config import RouterConfig

            return RouterConfig
        case "prefill_node":
            from prefill_node.config import PrefillNodeConfig

            return PrefillNodeConfig
        case "decode_node":
            from decode_node.config import DecodeNodeConfig

            return DecodeNodeConfig
        case "draft_node":
            from draft_node.config import DraftNodeConfig

            return DraftNodeConfig
    raise AssertionError(f"{role} is none of {ROLES}")


def _lines(values: Mapping[str, Any], path: tuple[str, ...], sources: Mapping[str, str]) -> Iterator[str]:
    indent = "  " * len(path)
    for name, value in values.items():
        key = ".".join((*path, name))
        if isinstance(value, Mapping):
            yield f"{indent}{name}:"
            yield from _lines(value, (*path, name), sources)
        else:
            source = f"  # {sources[key]}" if key in sources else ""
            yield f"{indent}{name}: {format_value(value)}{source}"
