"""Where settings come from: defaults < `--default` < YAML file < imported files < environment < `--set`."""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.config.imports.base import SPECULATIVE, Imported
from outrider.config.imports.formats import parse_reference, read_import
from outrider.config.settings import default_of, nested_type, setting_fields
from outrider.config.unknown_keys import unknown_key
from outrider.config.values import checked, from_text, without_passwords
from outrider.config.yaml_files import open_node
from outrider.errors import ConfigError

if TYPE_CHECKING:  # a client has settings (TLS) and reads none: only what reads a file imports yaml
    import yaml

SECTIONS = (
    *("model", "kv_cache", "kv_transfer", "server", "telemetry", "security"),
    *("router", "prefill_node", "decode_node", "draft_node", "cluster", "gateway"),
)
"""Every section that a file may have, whichever role reads it."""

ENVIRONMENT_PREFIX = "OUTRIDER_"
CONFIG_FILE_VARIABLE = "OUTRIDER_CONFIG"
MODEL = ("model", "id")
DRAFTS = (("cluster", "draft"), ("model", "head"), ("draft_node", "proposer"))
"""An imported speculative_config counts only where environment and flags name none of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """The sections in force, and for every key that was set, where."""

    sections: dict[str, Any]
    sources: dict[str, str]
    imported: dict[str, Any]  # of imported files what is in force, by key
    warnings: list[str]  # what imported files say to no effect


def load_config(
    sections: Mapping[str, type],
    *,
    file: Path | None,
    environ: Mapping[str, str],
    overrides: Sequence[str] = (),
    defaults: Sequence[str] = (),
    imports: Sequence[str] = (),
    role: str | None = None,
) -> ResolvedConfig:
    """One instance for each section. `overrides` and `defaults` are "decode_node.max_running_sequences=32".

    `imports` are files of other servers, those for one `role` as "prefill=FILE".

    Raises: ConfigError, naming the key, its source and the nearest valid key or the allowed range.
    """
    settings, explicit = _Settings(sections), _Settings(sections)
    for default in defaults:
        settings.take_override(default, flag="--default")
    if file is not None:
        settings.take_file(file)
    explicit.take_environment(environ)
    for override in overrides:
        explicit.take_override(override)
    imported, warnings = settings.take_imports(imports, role, explicit)
    settings.take_all(explicit)
    resolved, sources = settings.resolve()
    return ResolvedConfig(sections=resolved, sources=sources, imported=imported, warnings=warnings)


class _Settings:
    """Collects raw values by key, later sources over earlier ones, and builds the sections."""

    def __init__(self, sections: Mapping[str, type]) -> None:
        self._sections = sections
        self._values: dict[tuple[str, ...], tuple[Any, str]] = {}
        self._named: set[tuple[str, ...]] = set()  # as text, in sections of other roles too

    def take_file(self, path: Path) -> None:
        with open_node(path) as (loader, node):
            if node is not None:
                self._take_node(loader, node, (), f"{path}:1")

    def _take_node(self, loader: yaml.SafeLoader, node: yaml.Node, path: tuple[str, ...], source: str) -> None:
        import yaml

        kind = self._type_at(path, source) if path else dict
        if kind is None:
            return  # a section of another role
        nested = not path or nested_type(kind) is not None
        if isinstance(node, yaml.MappingNode) and nested:
            lines: dict[str, int] = {}
            for key_node, value_node in node.value:
                key, line = str(loader.construct_object(key_node, deep=True)), key_node.start_mark.line + 1
                where = f"{source.rpartition(':')[0]}:{line}"
                if key in lines:
                    raise ConfigError(f"{where}: {'.'.join((*path, key))} stands in line {lines[key]} already")
                lines[key] = line
                self._take_node(loader, value_node, (*path, key), where)
            return
        value = loader.construct_object(node, deep=True)
        if value is None and nested:
            return  # an empty section
        if nested:
            name = ".".join(path) or "the file"
            raise ConfigError(f"{source}: {name} is a group of settings, not {value!r}")
        self._values[path] = (value, source)

    def take_environment(self, environ: Mapping[str, str]) -> None:
        for name in sorted(environ):
            if not name.startswith(ENVIRONMENT_PREFIX):
                continue
            path = tuple(name[len(ENVIRONMENT_PREFIX) :].lower().split("__"))
            if len(path) == 1 and not path[0].startswith(SECTIONS):
                continue  # OUTRIDER_CONFIG, OUTRIDER_ANNOUNCE_FD, …: not settings
            self._take_text(path, environ[name], f"environment variable {name}")

    def take_override(self, override: str, flag: str = "--set") -> None:
        key, equals, text = override.partition("=")
        source = f"{flag} {without_passwords(override)}"
        if not equals:
            raise ConfigError(f"{source}: expected KEY=VALUE")
        self._take_text(tuple(key.strip().split(".")), text, source)

    def take_imports(
        self, imports: Sequence[str], role: str | None, explicit: _Settings
    ) -> tuple[dict[str, Any], list[str]]:
        """Files of other servers, but for what is `explicit`. Returns what was taken, and warnings."""
        taken: dict[str, Any] = {}
        warnings: list[str] = []
        model = explicit._values.get(MODEL) or self._values.get(MODEL)
        has_draft = not explicit._named.isdisjoint(DRAFTS)
        for reference in imports:
            only_role, path = parse_reference(reference)
            if only_role not in (None, role):
                continue
            imported = Imported(keys=read_import(path, target=model[0] if model else "")[1])
            warnings += imported.warnings
            for foreign in imported.keys:
                here = {
                    name: tuple(name.split("."))
                    for name in foreign.settings
                    if self._type_at(tuple(name.split(".")), foreign.origin) is not None
                }
                if foreign.settings and only_role and not here:
                    warnings.append(f"{foreign.origin}: nothing that a {only_role} has")
                if has_draft and foreign.key.startswith(SPECULATIVE):
                    continue
                for name, key in here.items():
                    if key not in explicit._values:
                        taken[name] = foreign.settings[name]
                        self._values[key] = (taken[name], foreign.origin)
        return taken, warnings

    def take_all(self, other: _Settings) -> None:
        """Over what is there."""
        self._values |= other._values

    def _take_text(self, path: tuple[str, ...], text: str, source: str) -> None:
        kind = self._type_at(path, source)
        self._named.add(path)
        if kind is None:
            return
        if nested_type(kind) is not None:
            raise ConfigError(f"{source}: {'.'.join(path)} is a group of settings; name one of them")
        self._values[path] = (from_text(kind, text, source), source)

    def _type_at(self, path: tuple[str, ...], source: str) -> Any:
        """The declared type at a path; None in a section of another role."""
        section, *names = path
        if section not in self._sections:
            if section in SECTIONS:
                return None
            raise ConfigError(unknown_key(source, section, "", sorted({*SECTIONS, *self._sections})))
        kind: Any = self._sections[section]
        for depth, name in enumerate(names):
            owner = nested_type(kind)
            known = [] if owner is None else [item.name for item in setting_fields(owner)]
            if owner is None or name not in known:
                raise ConfigError(
                    unknown_key(source, name, ".".join(path[: depth + 1]), known, tuple(names[depth + 1 :]))
                )
            kind = typing.get_type_hints(owner)[name]
        return kind

    def resolve(self) -> tuple[dict[str, Any], dict[str, str]]:
        """The sections, and the sources by key."""
        sections = {name: self._build((name,), kind, default_of(kind, name)) for name, kind in self._sections.items()}
        sources = {".".join(path): source for path, (_, source) in self._values.items()}
        return sections, sources

    def _build(self, path: tuple[str, ...], kind: Any, default: Any) -> Any:
        changes: dict[str, Any] = {}
        sources: dict[str, str] = {}  # by field
        hints = typing.get_type_hints(kind)
        for item in setting_fields(kind):
            here = (*path, item.name)
            owner = nested_type(hints[item.name])
            if owner is not None:
                if any(other[: len(here)] == here for other in self._values):
                    inner = getattr(default, item.name)
                    inner = default_of(owner, ".".join(here)) if inner is None else inner
                    changes[item.name] = self._build(here, owner, inner)
            elif here in self._values:
                value, source = self._values[here]
                sources[item.name] = source
                changes[item.name] = checked(value, hints[item.name], ".".join(here), source, item.metadata)
        if not changes:
            return default
        try:
            return replace(default, **changes)
        except ValueError as error:  # a check over several fields, in __post_init__
            raise ConfigError(f"{_blamed(str(error), sources)}: {'.'.join(path)}: {error}") from error


def _blamed(message: str, sources: Mapping[str, str]) -> str:
    """Where the fields that a message names were set; all sources when it names none of them."""
    named = [source for name, source in sources.items() if re.search(rf"\b{name}\b", message)]
    return ", ".join(dict.fromkeys(named or sources.values()))


def environment_name(key: str) -> str:
    """`decode_node.draft_targets` → `OUTRIDER_DECODE_NODE__DRAFT_TARGETS`."""
    return ENVIRONMENT_PREFIX + key.upper().replace(".", "__")
