"""Loads settings from their sources. Each of these sources overrides the ones before it:

defaults < `--default` < YAML file < files of other servers < environment < arguments of vLLM < `--set`
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any

from outrider.config.imports.translate import SPECULATIVE, Imported, Translated, has_rule, kind_of_file, translate
from outrider.config.settings import describe_settings, options_of, setting_fields, unknown_key
from outrider.config.values import checked, from_text, without_passwords
from outrider.config.yaml_files import Entry, read_entries
from outrider.errors import ConfigError

ROLES = ("router", "prefill_node", "decode_node", "draft_node")
SECTIONS = ("model", "kv_cache", "kv_transfer", "server", "telemetry", "security", *ROLES, "cluster", "gateway")
"""Every section that a file may have, for all roles."""

ENVIRONMENT_PREFIX = "OUTRIDER_"
CONFIG_FILE_VARIABLE = "OUTRIDER_CONFIG"
OTHER_VARIABLES = frozenset(
    ENVIRONMENT_PREFIX + name
    for name in (
        *("CONFIG", "TARGET", "CACHE_DIR", "STORE_PASSWORD", "KERNEL_LIBRARIES", "DRAFT_NODES"),
        *("ANNOUNCE_FD", "PARENT_PID"),  # passed between processes of a cluster
        *("FAULTS", "FAULTS_ONCE", "SOAK_REQUESTS", "PEERS_DIR", "COMPOSE_TEST_START_SECONDS"),  # for tests
        *("ROUTER_PORT", "SHM_SIZE", "TAG", "TLS_DIR"),  # for compose.yaml
    )
)
"""Environment variables that have the prefix but are not settings."""
KUBERNETES_VARIABLE = re.compile(r"\w+_(SERVICE_HOST|SERVICE_PORT\w*|PORT_\d+_\w+)=.*|\w+_PORT=\w+://.*")
"""Matches variables that Kubernetes sets in every pod for a service with a name such as outrider-router."""
DRAFTER_KEYS = ("cluster.draft", "model.head", "draft_node.proposer")
"""Settings that choose the drafter. If one of them overrides an imported speculative_config, all of it is ignored."""

Layer = dict[str, Entry]
"""The settings of one source, by key. Values in sections of other roles are not converted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """The effective sections, and the source of every key that was set."""

    sections: dict[str, Any]
    sources: dict[str, str]  # by key
    imported: dict[str, Any]  # effective values from other servers, by key, also for other roles' sections
    elsewhere: Layer  # unconverted values in sections of other roles
    warnings: list[str]  # one for each imported key without effect and each unknown environment variable

    @property
    def overrides(self) -> list[str]:
        """The imported values, in the form of `--set`."""
        texts = {key: ",".join(value) if isinstance(value, list) else value for key, value in self.imported.items()}
        return [f"{key}={text}" for key, text in texts.items()]


def load_config(
    sections: Mapping[str, type],
    *,
    file: Path | None,
    environ: Mapping[str, str],
    flags: Sequence[Entry] = (),
    overrides: Sequence[str] = (),
    defaults: Sequence[str] = (),
    imports: Sequence[str] = (),
    arguments: Sequence[Entry] = (),
    role: str | None = None,
) -> ResolvedConfig:
    """Loads the settings of all sections.

    `overrides` and `defaults` are texts such as "decode_node.max_running_sequences=32". `flags` are settings from flags
    of a command line, over which `overrides` take precedence. `imports` are files of other servers; "prefill=FILE" is
    used only if `role` is the prefill node. `arguments` are vLLM's.

    Raises: ConfigError, naming the key, its source and the nearest valid key or the allowed range.
    """
    known = _Known(sections)
    below = known.take(_settings(defaults, "--default"), is_text=True)
    below |= _take_file(known, file)
    environment = known.take(_variables(environ), is_text=True)
    warnings = list(known.unknown_variables(environ))
    given = known.take([*flags, *_settings(overrides, "--set")], is_text=True)
    explicit = environment | given
    model = explicit.get("model.id") or below.get("model.id")
    target = "" if model is None else str(model.value)
    keys: list[Translated] = []  # from the files
    for only_role, path in map(parse_reference, imports):
        if only_role in (None, role):
            imported = Imported(keys=translate(read_entries(path), target=target))
            keys += imported.keys
            warnings += imported.warnings
            if only_role:
                warnings += [f"{key.origin}: nothing that a {role} has" for key in imported.keys if known.lacks(key)]
    named = Imported(keys=translate(arguments, target=target))
    rivals = [given[key].source for key in DRAFTER_KEYS if key in given]
    if rivals and any(key.entry.key.startswith(SPECULATIVE) for key in named.keys):
        raise ConfigError(f"{SPECULATIVE} and {rivals[0]} both choose the drafter: keep one")
    layer = known.take(_settings_of(named.keys, given), is_text=True)
    layer = known.take(_settings_of(keys, explicit | layer)) | layer
    values = below | explicit | layer
    return ResolvedConfig(
        sections=known.build(values),
        sources={key: entry.source for key, entry in values.items() if key in known.settings},
        imported={key: entry.value for key, entry in layer.items()},
        elsewhere={key: entry for key, entry in values.items() if key not in known.settings},
        warnings=warnings + named.warnings,
    )


def parse_reference(text: str) -> tuple[str | None, Path]:
    """Parses `prefill=FILE` to ("prefill_node", FILE), and FILE alone, which is for all services, to (None, FILE)."""
    name, equals, path = text.partition("=")
    role = next((role for role in ROLES if name in (role, role.removesuffix("_node"))), None)
    return (role, Path(path)) if equals and role else (None, Path(text))


def environment_name(key: str) -> str:
    """Returns a key's environment variable: OUTRIDER_DECODE_NODE__DRAFT_TARGETS for decode_node.draft_targets."""
    return ENVIRONMENT_PREFIX + key.upper().replace(".", "__")


def _variables(environ: Mapping[str, str]) -> Iterator[Entry]:
    """Yields an entry for each variable that names a section and a key. Unknown keys are errors later."""
    for name in sorted(environ):
        key = name.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".")
        if name.startswith(ENVIRONMENT_PREFIX) and "." in key:
            yield Entry(key=key, value=environ[name], source=f"environment variable {name}")


def _settings(texts: Sequence[str], flag: str) -> Iterator[Entry]:
    for text in texts:
        key, equals, value = text.partition("=")
        source = f"{flag} {without_passwords(text)}"
        if not equals:
            raise ConfigError(f"{source}: expected KEY=VALUE")
        yield Entry(key=key.strip(), value=value, source=source)


def _settings_of(keys: Sequence[Translated], above: Layer) -> list[Entry]:
    """Returns the imported settings that the layer `above` does not override.

    If `above` chooses the drafter, an imported speculative_config is ignored as a whole.
    """
    has_draft = not above.keys().isdisjoint(DRAFTER_KEYS)
    return [
        Entry(key=name, value=value, source=key.origin, text=key.entry.text if value is key.entry.value else None)
        for key in keys
        if not (has_draft and key.entry.key.startswith(SPECULATIVE))
        for name, value in key.settings.items()
        if name not in above
    ]


class _Known:
    """The settings of a role's sections."""

    def __init__(self, sections: Mapping[str, type]) -> None:
        self._sections = sections
        self.settings = {info.key: info for info in describe_settings(sections)}

    def lacks(self, key: Translated) -> bool:
        """Returns whether a key sets only settings of other roles."""
        return bool(key.settings) and self.settings.keys().isdisjoint(key.settings)

    def unknown_variables(self, environ: Mapping[str, str]) -> Iterator[str]:
        """Yields a warning for each unknown variable with the prefix. Raises: ConfigError if it names a section."""
        names = {environment_name(key).replace("__", "_"): environment_name(key) for key in self.settings}
        for name in sorted(environ):
            is_other = name in OTHER_VARIABLES or KUBERNETES_VARIABLE.fullmatch(f"{name}={environ[name]}")
            if name.startswith(ENVIRONMENT_PREFIX) and "__" not in name and not is_other:
                known = [*names, *OTHER_VARIABLES]
                same_end = [each for each in names if each.endswith(name.removeprefix(ENVIRONMENT_PREFIX[:-1]))]
                nearest = difflib.get_close_matches(name, same_end or known, n=1, cutoff=0.0)[0]
                problem = f"environment variable {name} is not a setting; the nearest is {names.get(nearest, nearest)}"
                if name.removeprefix(ENVIRONMENT_PREFIX).lower().startswith(SECTIONS):
                    raise ConfigError(problem)
                yield problem

    def take(self, entries: Iterable[Entry], *, is_text: bool = False) -> Layer:
        """Returns the last entry of each key, by key. `is_text`: whether entries are from a command line or variables.

        Raises: ConfigError for an unknown key.
        """
        taken: Layer = {}
        for entry in entries:
            info, section = self.settings.get(entry.key), entry.key.partition(".")[0]
            if info is None and (section in self._sections or section not in SECTIONS):
                self._check_group(entry, is_text=is_text)
            else:
                taken[entry.key] = entry if info is None else _read(entry, info.kind, is_text=is_text)
        return taken

    def _check_group(self, entry: Entry, *, is_text: bool) -> None:
        """Checks an entry that names no setting. Raises: ConfigError unless it names a group and has no value."""
        if not any(key.startswith(f"{entry.key}.") for key in self.settings):
            raise ConfigError(f"{entry.source}: {unknown_key(entry.key, {*SECTIONS, *self.settings})}")
        if entry.value not in (None, {}):
            wrong = "; name one of them" if is_text else f", not {entry.value!r}"
            raise ConfigError(f"{entry.source}: {entry.key} is a group of settings{wrong}")

    def build(self, values: Layer) -> dict[str, Any]:
        """Returns the sections. Raises: ConfigError for a value of a wrong type or out of range."""
        return {name: self._build(name, kind(), values) for name, kind in self._sections.items()}

    def _build(self, prefix: str, section: Any, values: Layer) -> Any:
        """Returns a copy of `section`, which holds the defaults, with the values of the keys below `prefix`."""
        changes: dict[str, Any] = {}
        sources: dict[str, str] = {}  # by field
        for item in setting_fields(section):
            key, default = f"{prefix}.{item.name}", getattr(section, item.name)
            if is_dataclass(default):
                changes[item.name] = self._build(key, default, values)
            elif key in values:
                sources[item.name] = values[key].source
                changes[item.name] = checked(self.settings[key], values[key])
        try:
            return replace(section, **changes)
        except ValueError as error:  # raised by a check over several fields, in __post_init__
            raise ConfigError(f"{_sources_named(str(error), sources)}: {prefix}: {error}") from error


def _take_file(known: _Known, file: Path | None) -> Layer:
    """Reads the configuration file. Raises: ConfigError; for another program's file, the error names that program."""
    entries = [] if file is None else read_entries(file)
    try:
        return known.take(entries)
    except ConfigError as error:
        if other := kind_of_file(entry for entry in entries if entry.key.partition(".")[0] not in SECTIONS):
            raise ConfigError(other) from error
        if entries and has_rule(entries[0].key):
            raise ConfigError(f"{error}; give a file of another server to --extra-engine-args") from error
        raise


def _read(entry: Entry, kind: Any, *, is_text: bool) -> Entry:
    """Converts an entry to the setting's type: quoted text to a number, for example, or a number to text."""
    has_text = not {str, Path}.isdisjoint(options_of(kind))
    if isinstance(entry.value, str) and (is_text or not has_text):
        return replace(entry, value=from_text(kind, entry.value, entry.source))
    if has_text and entry.text is not None and entry.value is not None:
        return replace(entry, value=entry.text)
    return entry


def _sources_named(message: str, sources: Mapping[str, str]) -> str:
    """Returns the sources of the fields that a message names, or all sources if it names no field."""
    named = [source for name, source in sources.items() if re.search(rf"\b{name}\b", message)]
    return ", ".join(dict.fromkeys(named or sources.values()))
