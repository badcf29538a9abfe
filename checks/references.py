"""Generates pages from the code (settings, command line, metrics, messages), and draws figures.

Fails if a page or a figure is stale. With `--write`, writes all of them instead.

.venv/bin/python checks/references.py [--write]
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import redirect_stdout, suppress
from io import StringIO
from itertools import groupby
from pathlib import Path

import mdformat
from figures import FIGURES
from message_reference import describe_messages
from prometheus_client import CollectorRegistry

from outrider.cli.config import ROLES, sections_of
from outrider.cli.main import COMMANDS, make_parser
from outrider.config.arguments import parse_role_arguments
from outrider.config.settings import describe_settings
from outrider.config.values import format_value
from outrider.service.telemetry.metrics import EngineMetrics, PrefillMetrics, RouterMetrics

DOCS = Path(__file__).resolve().parents[1] / "docs"
STYLE = {"wrap": 120, "number": True, "plugin": {"tables": {"compact_tables": True}}}
"""mdformat's options, the same as in .mdformat.toml."""

KINDS = {  # by type: the page's description of the values, for settings that have no limits
    "bool": "true or false",
    "pathlib.Path | None": "path or null",
    "str": "text",
    "tuple[int, ...]": "list of numbers",
    "tuple[str, ...]": "list of texts",
}
SETTINGS_HEAD = """# Settings

How settings are given: [operations](operations.md#settings). A process reads the sections that concern it and ignores
the others. The environment variable of `kv_cache.memory` is `OUTRIDER_KV_CACHE__MEMORY`."""
COMMANDS_HEAD = """# Command line

What each command does in practice: [operations](operations.md). Exit status: 0; 1 for an error, with one line on
stderr; 2 for a wrong command line or setting; 130 for Ctrl-C. `outrider replay` has one more:
[replay](replay.md#replay)."""
METRICS_HEAD = """# Metrics

What each process exports on its `server.metrics_port`, in the text format of Prometheus. Names and labels are vLLM's
where vLLM has them. Every series has the label `model_name` too. A histogram exports
`…_bucket{le}`, `…_sum` and `…_count`. What to watch: [monitoring](monitoring.md)."""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yields a Markdown table, after an empty line."""
    yield ""
    for cells in (head, ["--"] * len(head), *rows):
        yield f"| {' | '.join(' '.join(cell.split()).replace('|', chr(92) + '|') for cell in cells)} |"


def settings_page() -> Iterator[str]:
    readers = {role: sections_of(role) for role in ROLES}
    yield SETTINGS_HEAD
    for section, infos in groupby(describe_settings(sections_of(None)), key=lambda info: info.key.partition(".")[0]):
        names = [role for role in ROLES if section in readers[role]] or ["`outrider up`"]
        yield f"\n## {section}\n\nRead by {'every process' if names == list(ROLES) else ', '.join(names)}."
        yield from table(
            ("key", "default", "allowed", "meaning"),
            (
                (
                    f"`{info.key}`",
                    f"`{format_value(info.default)}`",
                    str(info.limits) or KINDS.get(info.type_name, info.type_name),
                    info.help,
                )
                for info in infos
            ),
        )


def command_page() -> Iterator[str]:
    yield COMMANDS_HEAD
    commands = [each for name in COMMANDS for each in _commands(name, COMMANDS[name], make_parser(name), name)]
    yield from table(("command", "does"), ((f"`outrider {name}`", summary) for name, summary, _ in commands))
    users: dict[tuple[str, str], list[str]] = {}
    for name, _, parser in commands:
        for row in map(_argument, _actions(parser)):
            users.setdefault(row, []).append(name)
    yield "\n## Options of several commands"
    shared = {row: names for row, names in users.items() if len(names) > 1}
    yield from table(
        ("argument", "of", "meaning"), ((row[0], ", ".join(names), row[1]) for row, names in shared.items())
    )
    for name, _, parser in commands:
        rows = [row for row in map(_argument, _actions(parser)) if row not in shared]
        if rows:
            yield f"\n## outrider {name}"
            yield from table(("argument", "meaning"), (row for row in rows if row[1]))
            undescribed = [row[0] for row in rows if not row[1]]
            if undescribed:
                yield f"\nAlso, as [vLLM has them](configuration.md): {', '.join(undescribed)}."
    yield "\n## Services\n\nEach service is a command of its own; `--help` lists the settings that it reads."
    options = {_options_of_service(role) for role in ROLES}
    yield f"\n```\n{chr(10).join(f'python -P -m {role}' for role in ROLES)}\n\n{chr(10).join(options)}\n```"


def _commands(
    name: str, summary: str, parser: argparse.ArgumentParser, verb: str
) -> Iterator[tuple[str, str, argparse.ArgumentParser]]:
    """Yields the name, summary and parser of a command, then those of its subcommands."""
    command = _commands_of(parser)[verb]
    yield name, summary, command
    helps = {
        each.dest: each.help or "" for action in command._actions for each in getattr(action, "_choices_actions", ())
    }
    for nested in _commands_of(command):
        yield from _commands(f"{name} {nested}", helps[nested], command, nested)


def _actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Returns a command's own arguments, without help and subcommands."""
    nested = _commands_of(parser)
    return [each for each in parser._actions if each.dest != "help" and each.choices is not nested]


def _commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Returns subcommands by name; empty if there are none."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return action.choices
    return {}


def _argument(action: argparse.Action) -> tuple[str, str]:
    choices = "" if action.choices is None else f"{{{','.join(map(str, action.choices))}}}"
    metavar = action.metavar or choices or action.dest.upper()
    value = "" if action.nargs == 0 else f" {metavar}"
    names = ", ".join(f"`{flag}{value}`" for flag in action.option_strings) or f"`{metavar.lower()}`"
    return names, (action.help or "") % {**vars(action), "prog": "outrider"}


def _options_of_service(role: str) -> str:
    """Returns the options in a service's help, without the settings, which have their own page."""
    text = StringIO()
    with redirect_stdout(text), suppress(SystemExit):
        parse_role_arguments(role, sections_of(role), ["--help"], environ={})
    return text.getvalue().partition("options:")[2].partition("\nsettings (")[0].strip("\n")


def metrics_page() -> Iterator[str]:
    yield METRICS_HEAD
    yield "\n## Router"
    yield from table(("name", "type", "labels", "meaning"), _metrics(RouterMetrics))
    yield "\n## Prefill, decode and draft nodes\n\nWhat a node does not do stays 0."
    of_all = list(_metrics(EngineMetrics))
    yield from table(("name", "type", "labels", "meaning"), of_all)
    yield "\n## Prefill nodes\n\nBeside those of every node."
    yield from table(
        ("name", "type", "labels", "meaning"), (row for row in _metrics(PrefillMetrics) if row not in of_all)
    )


def _metrics(make: Callable[..., object]) -> Iterator[tuple[str, str, str, str]]:
    """Yields a row for each metric that `make` registers. Only initial label values are listed."""
    registry = CollectorRegistry()
    make(model_name="", registry=registry)
    for collector in registry._collector_to_names:
        for family in collector.collect():
            known = {
                label: {sample.labels[label]: None for sample in family.samples if label in sample.labels}
                for label in getattr(collector, "_labelnames", ())
            }
            labels = [
                f"`{label}`" + (f": {', '.join(values)}" if values else "")
                for label, values in known.items()
                if label != "model_name"
            ]
            name = f"{family.name}_total" if family.type == "counter" else family.name
            yield f"`{name}`", family.type, "; ".join(labels), family.documentation


PAGES = {
    "settings.md": settings_page,
    "cli.md": command_page,
    "metrics.md": metrics_page,
    "protos.md": lambda: describe_messages(table),
}


def render(lines: Iterable[str]) -> str:
    """Returns the page as mdformat formats it."""
    head, *rest = "\n".join(lines).split("\n\n", 1)
    text = "\n\n".join([head, "Generated from the code by `make references`.", *rest])
    return mdformat.text(text, options=STYLE, extensions={"gfm"})


def main() -> int:
    for variable in [name for name in os.environ if name.startswith("OUTRIDER_")]:
        del os.environ[variable]  # it could change defaults of flags
    os.environ["COLUMNS"] = "110"
    pages = {DOCS / name: render(lines()) for name, lines in PAGES.items()}
    pages |= {DOCS / "figures" / name: draw() for name, draw in FIGURES.items()}
    stale = [path for path, text in pages.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if "--write" in sys.argv[1:]:
        for path in stale:
            path.write_text(pages[path], encoding="utf-8")
        return 0
    for path in stale:
        sys.stderr.write(f"{path.relative_to(DOCS.parent)} is stale: run make references\n")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
