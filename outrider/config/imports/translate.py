"""What becomes of each key of another server's configuration, by the rules of `keys.yaml`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from outrider.config.imports.speculation import speculation
from outrider.config.imports.translated import SPECULATIVE, Kind, Translated
from outrider.config.settings import unknown_key
from outrider.config.yaml_files import Entry
from outrider.errors import ConfigError

MAX_SHARE = 0.95  # of kv_cache.memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What keys are here, unless their value is one of `allowed`, which ask for what is done anyway."""

    kind: Kind
    note: str = ""
    to: Sequence[str] = ()  # of kind SET: settings that get the converted value
    by: str = "same"  # one of CONVERTERS
    allowed: Sequence[Any] = ()


def translate(entries: Iterable[Entry], *, target: str = "") -> list[Translated]:
    """In their order. `target`: the served model, with which a head may come; empty: the one that the entries name.

    Raises: ConfigError for a `speculative_config` that is text, as vLLM's flag, and no JSON; for a file of something
    that is no model server.
    """
    flat = {entry.key: entry for entry in _flattened(entries)}
    if not flat:
        return []  # without reading the table
    if other := kind_of_file(flat.values()):
        raise ConfigError(other)
    if not target and "model" in flat:
        target = str(flat["model"].value)
    who_drafts = speculation(flat, target, _table()["speculative"])
    return _without_contradictions([who_drafts.get(key) or _by_rule(entry) for key, entry in flat.items()])


def kind_of_file(entries: Iterable[Entry]) -> str:
    """What a file is that no model server reads, such as an orchestrator's, and what to do; empty where it may be one.

    By keys that only such files have: those of the table's `files`, in which * stands for anything.
    """
    for entry in entries:
        for kind in _table()["files"]:
            if any(fnmatchcase(entry.key, pattern) for pattern in kind["keys"]):
                return f"{entry.source}: {entry.key.partition('.')[0]}: this is {kind['is']}: {kind['note']}"
    return ""


def _without_contradictions(keys: Sequence[Translated]) -> list[Translated]:
    """The last of several keys for one setting counts, such as vLLM's after TensorRT-LLM's: the others are warnings."""
    last = {name: key for key in keys for name in key.settings}
    found = []
    for key in keys:
        kept = {name: value for name, value in key.settings.items() if last[name].settings[name] == value}
        others = [last[name].entry for name in key.settings if name not in kept]
        note = "".join(f"{entry.key} in {entry.source} is used instead" for entry in others[:1])
        found.append(replace(key, kind=Kind.WARNING, note=note, settings=kept) if others else key)
    return found


def _flattened(entries: Iterable[Entry]) -> Iterator[Entry]:
    """With underscores for dashes; groups that are one value, of JSON or Python, are keys too."""
    for entry in entries:
        key, value = entry.key.replace("-", "_"), entry.value
        if isinstance(value, str) and (key == SPECULATIVE or value.lstrip().startswith("{")):  # as the flag takes it
            try:
                value = _unquoted(value)
            except ValueError as error:
                raise ConfigError(f"{entry.source} {key}: neither a value nor JSON: {value!r}") from error
        if isinstance(value, Mapping) and value:
            yield from _flattened(
                Entry(key=f"{key}.{name}", value=inner, source=entry.source) for name, inner in value.items()
            )
        elif not entry.is_group:
            yield replace(entry, key=key, value=value)


def _unquoted(value: Any) -> Any:
    """The value in a text, as vLLM takes it, which makes flags of its file: "16" is a number, "false" is none.

    Raises: ValueError for what is no YAML.
    """
    if not isinstance(value, str):
        return value
    import yaml

    try:
        return yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ValueError(f"{value!r} is no value") from error


@cache
def _table() -> dict[str, Any]:
    import yaml

    return dict(yaml.safe_load(Path(__file__).with_name("keys.yaml").read_text(encoding="utf-8")))


@cache
def rules() -> Mapping[str, Rule]:
    """By key. That of "moe_config.*" is for every key of the group."""
    return {
        key: Rule(kind=kind, **{name: value for name, value in item.items() if name != "keys"})
        for kind in (Kind.SET, Kind.ERROR, Kind.WARNING)
        for item in _table()[kind.value]
        for key in item["keys"]
    }


def has_rule(key: str) -> bool:
    """Whether files of other servers have such a key."""
    return key.replace("-", "_") in rules()


def _by_rule(entry: Entry) -> Translated:
    """By the key's own rule, or that of its group; an error with the nearest key where there is none."""
    parts, value = entry.key.split("."), entry.value
    names = [entry.key, *(".".join((*parts[:end], "*")) for end in range(len(parts), 0, -1))]
    rule = next((rules()[name] for name in names if name in rules()), None)
    try:
        plain = _unquoted(value)
    except ValueError:  # a text that is nothing else
        plain = value
    is_empty = plain in (None, {}, [])
    if rule is None:
        if not any(key.startswith(f"{entry.key}.") for key in rules()):
            return Translated(entry=entry, kind=Kind.ERROR, note=unknown_key(entry.key, rules().keys()))
        note = "" if is_empty else "it is a group of keys"
        return Translated(entry=entry, kind=Kind.ERROR if note else Kind.SAME, note=note)
    is_default = is_empty and rule.by != "is_given"
    if is_default or any(
        given == one and isinstance(given, bool) is isinstance(one, bool)
        for given in (value, plain)
        for one in rule.allowed
    ):
        return Translated(entry=entry, kind=Kind.SAME)
    try:
        settings = dict.fromkeys(rule.to, CONVERTERS[rule.by](value if rule.by in AS_WRITTEN else plain))
    except ValueError as error:
        return Translated(entry=entry, kind=Kind.ERROR, note=str(error))
    return Translated(entry=entry, kind=rule.kind, note=rule.note, settings=settings)


def _percent(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= MAX_SHARE:
        raise ValueError(f"{value!r} is not a share of the memory above 0 and at most {MAX_SHARE}")
    return f"{100 * value:g}%"


def _only_name(value: Any) -> Any:
    if isinstance(value, list) and len(value) != 1:
        raise ValueError(f"a model is served under one name, not {len(value)}")
    return value[0] if isinstance(value, list) else value


def _negated(value: Any) -> bool:
    if value not in (True, False):
        raise ValueError(f"{value!r} is neither true nor false")
    return not value


CONVERTERS = {
    "same": lambda value: value,
    "percent": _percent,
    "only_name": _only_name,
    "is_given": lambda value: value is not None,  # null turns a group off
    "negated": _negated,
}
"""From a value of another server to ours, by the name in the table. Each raises ValueError for what cannot be."""
AS_WRITTEN = ("same", "only_name")
"""They take a text as one: what it is for is known later. The others take what is in the quotes."""
