"""`outrider config`: the settings in force, as YAML that can be used as a configuration file."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from outrider.cluster import ClusterConfig
from outrider.config import CONFIG_FILE_VARIABLE, format_value, resolve_config, to_plain
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
    """The sections that a service reads; without a role, all.

    The services' own classes are looked up by name (`decode_node.config.DecodeNodeConfig`):
    the shared package never imports a service.
    """
    from outrider.model_hub.config import ModelConfig

    roles = ROLES if role is None else (role,)
    sections: dict[str, type] = {}
    if role != "router":
        sections["model"] = ModelConfig
    sections["telemetry"] = TelemetryConfig
    for name in roles:
        class_name = "".join(part.capitalize() for part in name.split("_")) + "Config"
        sections[name] = getattr(importlib.import_module(f"{name}.config"), class_name)
    if role is None:
        sections["cluster"] = ClusterConfig
    return sections


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
