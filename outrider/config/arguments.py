"""The command line that every role has."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.config.imports.formats import ROLES, parse_reference
from outrider.config.resolve import CONFIG_FILE_VARIABLE, load_config
from outrider.config.settings import describe_settings
from outrider.config.values import format_value
from outrider.errors import ConfigError
from outrider.faults import parse_faults


def parse_role_arguments(
    role: str,
    sections: Mapping[str, type],
    argv: Sequence[str] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Reads a role's command line: `--config FILE`, `--set KEY=VALUE`, `--help` with every key.

    A mistake ends the process with status 2 and one line on stderr.
    """
    environ = os.environ if environ is None else environ
    parser = argparse.ArgumentParser(
        prog=f"python -m {role}",
        description=f"Outrider's {role}.",
        epilog=_help_of(sections),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_settings_arguments(parser, environ)
    parser.add_argument(
        "--default",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        dest="defaults",
        help="as --set, but file, environment and --set override it; repeatable",
    )
    arguments = parser.parse_args(argv)
    # In a single process a file is for its role, whose warnings then name what the role has no use for.
    imports = [
        text if parse_reference(text)[0] or role not in ROLES else f"{role}={text}" for text in arguments.imports
    ]
    try:
        parse_faults(environ)
        resolved = load_config(
            sections,
            file=arguments.config,
            environ=environ,
            overrides=arguments.overrides,
            defaults=arguments.defaults,
            imports=imports,
            role=role,
        )
    except ConfigError as error:
        sys.stderr.write(f"{role}: {error}\n")
        raise SystemExit(2) from error
    write_warnings(role, resolved.warnings)
    return resolved.sections


def add_settings_arguments(parser: argparse.ArgumentParser, environ: Mapping[str, str]) -> None:
    """What every command with settings has: `config`, `overrides` and `imports` of the result."""
    default = environ.get(CONFIG_FILE_VARIABLE)
    parser.add_argument(
        "--config",
        metavar="FILE",
        type=Path,
        default=Path(default) if default else None,
        help=f"YAML file; default: ${CONFIG_FILE_VARIABLE}, else none",
    )
    parser.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], dest="overrides", help="one setting; repeatable"
    )
    parser.add_argument(
        "--extra-engine-args",
        metavar="[ROLE=]FILE",
        action="append",
        default=[],
        dest="imports",
        help="YAML or JSON of TensorRT-LLM, Dynamo or vLLM, over --config, below environment and flags; with prefill=, "
        "decode= or draft= for those nodes only; repeatable",
    )


def write_warnings(command: str, warnings: Sequence[str]) -> None:
    """What imported files ask for to no effect, on stderr."""
    for warning in dict.fromkeys(warnings):
        sys.stderr.write(f"{command}: warning: {warning}\n")


def _help_of(sections: Mapping[str, type]) -> str:
    lines = [
        "settings (YAML file < environment < --set; the variable of a.b is OUTRIDER_A__B):",
        "",
    ]
    for info in describe_settings(sections):
        limits = str(info.limits)
        allowed = f", {limits}" if limits else ""
        lines.append(f"  {info.key} = {format_value(info.default)}  ({info.type_name}{allowed})")
        if info.help:
            lines.append(f"      {info.help}")
    return "\n".join(lines)
