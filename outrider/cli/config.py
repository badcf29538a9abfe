"""`outrider config`: the settings in force, as YAML that can be used as a configuration file; imports; the schema."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from outrider.cluster import ClusterConfig, GatewayConfig
from outrider.config import (
    ResolvedConfig,
    add_settings_arguments,
    config_schema,
    format_value,
    load_config,
    to_plain,
    write_warnings,
)
from outrider.config.imports import ForeignKey, Imported, parse_reference, read_import
from outrider.errors import ConfigError
from outrider.rpc.peer_security import SecurityConfig
from outrider.service.config import ServerConfig, TelemetryConfig

ROLES = ("router", "prefill_node", "decode_node", "draft_node")
SECRETS = ("api_key", "hf_token")
"""Keys of other servers whose values are not shown."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--role", choices=ROLES, help="only the settings of this service; default: all")
    add_settings_arguments(parser, os.environ)
    parser.set_defaults(show=_show)
    actions = parser.add_subparsers(metavar="ACTION", help="default: print the settings in force")
    schema = actions.add_parser("schema", help="print a JSON schema of the configuration file, for editors")
    schema.set_defaults(show=_print_schema)
    imported = actions.add_parser("import", help="print what became of a file of TensorRT-LLM, Dynamo or vLLM")
    imported.add_argument("file", metavar="FILE", type=Path, help="YAML or JSON")
    imported.add_argument(
        "--write", metavar="OUT", help="write our own configuration file; -: to stdout, without table"
    )
    imported.set_defaults(show=_import)


def run(arguments: argparse.Namespace) -> int:
    return int(arguments.show(arguments))


def _load(arguments: argparse.Namespace, imports: Sequence[str]) -> ResolvedConfig:
    return load_config(
        sections_of(arguments.role),
        file=arguments.config,
        environ=os.environ,
        overrides=arguments.overrides,
        imports=imports,
        role=arguments.role,
    )


def _show(arguments: argparse.Namespace) -> int:
    resolved = _load(arguments, arguments.imports)
    others = [text for text in arguments.imports if parse_reference(text)[0] not in (None, arguments.role)]
    hints = [f"{text} is for {parse_reference(text)[0]}, which --role shows" for text in others]
    write_warnings("outrider config", [*resolved.warnings, *hints])
    for name, section in resolved.sections.items():
        sys.stdout.write(f"{name}:\n")
        for line in _lines(to_plain(section), (name,), resolved.sources):
            sys.stdout.write(line + "\n")
    return 0


def _print_schema(arguments: argparse.Namespace) -> int:
    sys.stdout.write(json.dumps(config_schema(sections_of(arguments.role)), indent=2) + "\n")
    return 0


def _import(arguments: argparse.Namespace) -> int:
    """Prints the table. Raises: ConfigError with errors, and nothing is written then."""
    explicit = _load(arguments, ())
    target = explicit.sections["model"].id if "model.id" in explicit.sources else ""
    format_, keys = read_import(arguments.file, target=target)
    if arguments.write != "-":
        sys.stdout.write(f"{arguments.file}, read as {format_.name}\n" + "".join(_table(keys)))
    imported = Imported(keys=keys)  # raises with errors
    _load(arguments, [str(arguments.file)])  # raises for values that are out of range
    written = "".join(_written(imported))
    if arguments.write == "-":
        write_warnings("outrider config", imported.warnings)
        sys.stdout.write(written)
    elif arguments.write is not None:
        try:
            Path(arguments.write).write_text(written, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--write {arguments.write}: {error.strerror}") from error
    return 0


def _table(keys: Sequence[ForeignKey]) -> Iterator[str]:
    """A line for each key, and one more for each further setting that it is."""
    rows = [("line", "key", "value", "result", "setting", "note")]
    for key in keys:
        settings = [f"{name}: {format_value(value)}" for name, value in key.settings.items()] or [""]
        line = key.source.rpartition(":")[2]
        value = "…" if key.key in SECRETS else format_value(key.value)
        rows += [(line, key.key, value, key.kind.value, settings[0], key.note)]
        rows += [("", "", "", "", setting, "") for setting in settings[1:]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(map(str.ljust, row, widths)).rstrip() + "\n"


def _written(imported: Imported) -> Iterator[str]:
    """A configuration file with the origin of each value."""
    origins = {key: (value, each.origin) for each in imported.keys for key, value in each.settings.items()}
    for section, keys in groupby(sorted(origins), key=lambda key: key.partition(".")[0]):
        yield f"{section}:\n"
        for key in keys:
            value, origin = origins[key]
            yield f"  {key.partition('.')[2]}: {format_value(value)}  # {origin}\n"


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
