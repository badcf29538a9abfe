"""`outrider config`: the settings in force, as YAML that can be used as a configuration file."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from outrider.cluster import ClusterConfig
from outrider.config import CONFIG_FILE_VARIABLE, format_value, resolve_config, to_plain
from outrider.rpc.peer_security import SecurityConfig
from outrider.service.config import TelemetryConfig

ROLES = ("router", "prefill_node", "decode_node", "draft_node")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--role", choices=ROLES, help="only the settings of this service; default: all")
    parser.add_argument("--config", metavar="FILE", type=Path, help=f"YAML file; default: ${CONFIG_FILE_VARIABLE}")
    parser.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], dest="overrides", help="one setting; repeatable"
    )


def run(arguments: argparse.Namespace) -> int:
    default = os.environ.get(CONFIG_FILE_VARIABLE)
    file = arguments.config or (Path(default) if default else None)
    resolved = resolve_config(sections_of(arguments.role), file=file, environ=os.environ, overrides=arguments.overrides)
    for name, section in resolved.sections.items():
        sys.stdout.write(f"{name}:\n")
        for line in _lines(to_plain(section), (name,), resolved.sources):
            sys.stdout.write(line + "\n")
    return 0


def sections_of(role: str | None) -> dict[str, type]:
    """The sections that a service reads; without a role, all."""
    from outrider.model_hub.config import ModelConfig

    sections: dict[str, type] = {}
    if role != "router":
        sections["model"] = ModelConfig
    sections["telemetry"] = TelemetryConfig
    sections["security"] = SecurityConfig
    sections |= {name: _config_of(name) for name in (ROLES if role is None else (role,))}
    if role is None:
        sections["cluster"] = ClusterConfig
    return sections


def _config_of(role: str) -> type:
    """Imported when it is asked for: where the router is installed, what nodes import need not be."""
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
