"""`outrider config`: prints effective settings as a valid YAML file, imports other servers' files, prints a schema."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.cluster.config import ClusterConfig
from outrider.config.arguments import add_settings_arguments, load_arguments, write_warnings
from outrider.config.imports.translate import Translated, translate
from outrider.config.resolve import ROLES, parse_reference
from outrider.config.resolve import SECTIONS as ALL_SECTIONS
from outrider.config.schema import config_schema
from outrider.config.values import format_value, to_plain
from outrider.config.yaml_files import read_entries
from outrider.errors import ConfigError
from outrider.service.config import GatewayConfig

SECRETS = ("api_key", "hf_token")
"""Keys in other servers' files. Their values are hidden."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--role", choices=ROLES, help="print only the settings of this service; default: all")
    add_settings_arguments(parser)
    parser.set_defaults(show=_show)
    actions = parser.add_subparsers(metavar="ACTION", help="default: print the settings in force")
    schema = actions.add_parser("schema", help="print a JSON schema of the configuration file, for editors")
    schema.set_defaults(show=_print_schema)
    imported = actions.add_parser(
        "import", help="print how each key of a file of TensorRT-LLM, Dynamo or vLLM is translated"
    )
    imported.add_argument("file", metavar="FILE", type=Path, help="YAML or JSON")
    imported.add_argument(
        "--write", metavar="OUT", help="write an Outrider configuration file; -: to standard output, without the table"
    )
    imported.set_defaults(show=_import)


def run(arguments: argparse.Namespace) -> int:
    return int(arguments.show(arguments))


def _show(arguments: argparse.Namespace) -> int:
    resolved = load_arguments(arguments, sections_of(arguments.role), role=arguments.role)
    others = [text for text in arguments.imports if parse_reference(text)[0] not in (None, arguments.role)]
    hints = [f"{text} is for {parse_reference(text)[0]}, which --role shows" for text in others]
    write_warnings("outrider config", [*resolved.warnings, *hints])
    plain = {name: to_plain(section) for name, section in resolved.sections.items()}
    sys.stdout.writelines(_lines(plain, resolved.sources))
    return 0


def _print_schema(arguments: argparse.Namespace) -> int:
    sys.stdout.write(json.dumps(config_schema(sections_of(arguments.role)), indent=2) + "\n")
    return 0


def _import(arguments: argparse.Namespace) -> int:
    """Prints the table of keys; writes the settings unless a key has an error. Raises: ConfigError for such a key."""
    sections = sections_of(arguments.role)
    arguments.imports = []
    explicit = load_arguments(arguments, sections, role=arguments.role)
    target = explicit.sections["model"].id if "model.id" in explicit.sources else ""
    keys = translate(read_entries(arguments.file), target=target)
    if arguments.write != "-":
        sys.stdout.writelines(_table(keys))
    arguments.imports = [str(arguments.file)]
    resolved = load_arguments(arguments, sections, role=arguments.role)
    written = "".join(_written(keys))
    if arguments.write == "-":
        write_warnings("outrider config", resolved.warnings)
        sys.stdout.write(written)
    elif arguments.write is not None:
        try:
            Path(arguments.write).write_text(written, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--write {arguments.write}: {error.strerror}") from error
    return 0


def _table(keys: Sequence[Translated]) -> Iterator[str]:
    """Yields a line for each key, and one for each further setting that the key sets."""
    rows = [("line", "key", "value", "result", "setting", "note")]
    for key in keys:
        settings = [f"{name}: {format_value(value)}" for name, value in key.settings.items()] or [""]
        line = key.entry.source.rpartition(":")[2]
        value = "…" if key.entry.key in SECRETS else format_value(key.entry.value)
        rows += [(line, key.entry.key, value, key.kind.value, settings[0], key.note)]
        rows += [("", "", "", "", setting, "") for setting in settings[1:]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(map(str.ljust, row, widths)).rstrip() + "\n"


def _written(keys: Sequence[Translated]) -> Iterator[str]:
    """Yields a configuration file with the origin of each value."""
    origins = {name: key.origin for key in keys for name in key.settings}
    values = {name: value for key in keys for name, value in key.settings.items()}
    sections: dict[str, dict[str, Any]] = {}
    for name in sorted(values):
        section, _, key = name.partition(".")
        sections.setdefault(section, {})[key] = values[name]
    return _lines(sections, origins)


def sections_of(role: str | None) -> dict[str, type]:
    """Returns the sections that a service reads, or all without a role.

    The sections' modules are imported lazily, since an install of the router lacks packages that nodes import.
    """
    if role is not None:
        sections: dict[str, type] = importlib.import_module(f"{role}.config").SECTIONS
        return sections
    found = {"cluster": ClusterConfig, "gateway": GatewayConfig}
    for each in ROLES:
        found |= sections_of(each)
    return {name: found[name] for name in ALL_SECTIONS}


def _lines(values: Mapping[str, Any], sources: Mapping[str, str], prefix: str = "") -> Iterator[str]:
    """Yields the lines of a YAML file with the source of each value. `sources` is indexed by full key."""
    indent = "  " * prefix.count(".")
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield f"{indent}{name}:\n"
            yield from _lines(value, sources, f"{key}.")
        else:
            source = f"  # {sources[key]}" if key in sources else ""
            yield f"{indent}{name}: {format_value(value)}{source}\n"
