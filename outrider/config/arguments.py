"""The command line common to all roles."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from outrider.config.imports import read_vllm_flags
from outrider.config.resolve import CONFIG_FILE_VARIABLE, ROLES, ResolvedConfig, load_config, parse_reference
from outrider.config.settings import SettingInfo, describe_settings
from outrider.config.values import checked, format_value, from_text, without_passwords
from outrider.config.yaml_files import Entry
from outrider.errors import ConfigError
from outrider.faults import parse_faults


def parse_role_arguments(
    role: str,
    sections: Mapping[str, type],
    argv: Sequence[str] | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
) -> dict[str, Any]:
    """Parses a role's command line: `--config FILE`, `--set KEY=VALUE`, or `--help`, which lists every key.

    An error ends the process with status 2 and one line on stderr.
    """
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
        help="a setting that file, environment and --set override; repeatable",
    )
    arguments = parser.parse_args(argv)
    if role in ROLES:
        # A file without a role belongs to this role, so that warnings name the settings in it that this role ignores.
        arguments.imports = [text if parse_reference(text)[0] else f"{role}={text}" for text in arguments.imports]
    try:
        parse_faults(environ)
        resolved = load_arguments(arguments, sections, environ=environ, role=role)
    except ConfigError as error:
        sys.stderr.write(f"{role}: {error}\n")
        raise SystemExit(2) from error
    write_warnings(role, resolved.warnings)
    return resolved.sections


def add_settings_arguments(parser: argparse.ArgumentParser, environ: Mapping[str, str] = os.environ) -> None:
    """Adds the arguments that `load_arguments` reads. Any other flag whose `dest` is a setting's key sets that key."""
    default = environ.get(CONFIG_FILE_VARIABLE)
    parser.add_argument(
        "--config",
        metavar="FILE",
        type=Path,
        default=Path(default) if default else None,
        help=f"YAML file with settings; default: ${CONFIG_FILE_VARIABLE}, else none",
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
        help="YAML or JSON file of TensorRT-LLM, Dynamo or vLLM; it overrides --config, and environment and flags "
        "override it; with prefill=, decode= or draft=, for those nodes only; repeatable",
    )


def add_setting_flags(parser: argparse.ArgumentParser, flags: Mapping[str, str], sections: Mapping[str, type]) -> None:
    """Adds `flags`, which maps flag names to settings. A flag takes the same values as `--set`, except empty ones."""
    known = {info.key: info for info in describe_settings(sections)}
    for flag, key in flags.items():
        info = known[key]
        text = f"{info.help} Default: {format_value(info.default)}.".replace("%", "%%")
        choices = info.limits.choices
        metavar = key.rpartition(".")[2].upper() if choices is None else f"{{{','.join(map(str, choices))}}}"
        parser.add_argument(f"--{flag}", dest=key, metavar=metavar, type=partial(_checked_text, info), help=text)
        parser.set_defaults(**{f"--{flag}": key})


def _checked_text(info: SettingInfo, text: str) -> str:
    """Returns the text unchanged. Raises: argparse.ArgumentTypeError if it is not a valid value of the setting."""
    if not text.strip():  # from an unset shell variable; would turn off a setting that may be null
        raise argparse.ArgumentTypeError(f"a value is missing for {info.key}")
    try:
        checked(info, Entry(key=info.key, value=from_text(info.kind, text, ""), source=""))
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix(": ")) from error
    return text


def given_settings(arguments: argparse.Namespace) -> list[str]:
    """Returns the given settings in the form of `--set`: those of flags first, then those of `--set` itself."""
    return [*(f"{entry.key}={entry.value}" for entry in _flag_entries(arguments)), *arguments.overrides]


def _flag_entries(arguments: argparse.Namespace) -> list[Entry]:
    """Returns an entry for each given flag of a setting. Errors name a flag as the user wrote it."""
    given = vars(arguments)
    names = {key: f"{flag} " for flag, key in given.items() if flag.startswith("--")}
    return [
        Entry(key=key, value=str(value), source=without_passwords(f"{names.get(key, f'--set {key}=')}{value}"))
        for key, value in given.items()
        if "." in key and value is not None
    ]


def load_arguments(
    arguments: argparse.Namespace,
    sections: Mapping[str, type],
    *,
    environ: Mapping[str, str] = os.environ,
    role: str | None = None,
) -> ResolvedConfig:
    """Loads the settings from a command line with the flags of `add_settings_arguments`, and optionally vLLM's.

    Raises: ConfigError.
    """
    return load_config(
        sections,
        file=arguments.config,
        environ=environ,
        flags=_flag_entries(arguments),
        overrides=arguments.overrides,
        defaults=getattr(arguments, "defaults", ()),
        imports=arguments.imports,
        arguments=read_vllm_flags(arguments),
        role=role,
    )


def write_warnings(command: str, warnings: Sequence[str]) -> None:
    """Writes a warning to stderr for each imported key that has no effect."""
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
