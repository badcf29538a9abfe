"""Translates another server's configuration: most keys by rules in `keys.yaml`, the choice of the drafter by code."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from outrider.config.settings import unknown_key
from outrider.config.yaml_files import Entry
from outrider.errors import ConfigError

SPECULATIVE = "speculative_config"
ADAPTERS = ("lora_modules", "lora_paths")
OFF = {"cluster.draft": "none", "decode_node.num_speculative_tokens": 0, "model.head": ""}
"""The settings that turn speculation off."""
MAX_SHARE = 0.95  # maximum kv_cache.memory, as a fraction of the memory


class Kind(Enum):
    """The result of translating a key."""

    SET = "set"
    SAME = "same"  # the key asks for the default behaviour
    WARNING = "warning"  # the key is ignored, because it concerns only speed
    ERROR = "error"  # the key would change answers or is required, but cannot be honoured


@dataclass(frozen=True, slots=True, kw_only=True)
class Translated:
    """One key of a file, or one argument, with the result. Keys in groups are flattened: `kv_cache_config.dtype`."""

    entry: Entry
    kind: Kind
    note: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)  # Outrider's, by key

    @property
    def origin(self) -> str:
        """The file, line and key, as `outrider config` shows them."""
        return f"{self.entry.source} {self.entry.key}"

    def __str__(self) -> str:
        return f"{self.origin}: {self.note}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """A translated file, or translated arguments, without errors."""

    keys: Sequence[Translated]

    def __post_init__(self) -> None:
        """Raises: ConfigError if the result of a key is an error."""
        errors = [key for key in self.keys if key.kind is Kind.ERROR]
        if errors:
            rest = f" (and {len(errors) - 1} more, which `outrider config import` lists)" if errors[1:] else ""
            raise ConfigError(f"{errors[0]}{rest}")

    @property
    def warnings(self) -> list[str]:
        return [str(key) for key in self.keys if key.kind is Kind.WARNING]

    @property
    def overrides(self) -> list[str]:
        """The settings, in the form of `--set` and `Launch.overrides`."""
        return [f"{name}={value}" for key in self.keys for name, value in key.settings.items()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How some keys are translated. The values in `allowed` ask for the default behaviour and are not translated."""

    kind: Kind
    note: str = ""
    to: Sequence[str] = ()  # for kind SET: settings that get the converted value
    by: str = "same"  # one of CONVERTERS
    allowed: Sequence[Any] = ()


def translate(entries: Iterable[Entry], *, target: str = "") -> list[Translated]:
    """Translates entries and returns the results in the same order.

    `target` is the served model, whose folder may have a head. If it is empty, the entries name the model.

    Raises: ConfigError if a `speculative_config` is text (vLLM's flag) but not JSON, or if the file belongs to
    something other than a model server.
    """
    flat = {entry.key: entry for entry in _flattened(entries)}
    if not flat:
        return []  # there is no need to read the rules
    if other := kind_of_file(flat.values()):
        raise ConfigError(other)
    if not target and "model" in flat:
        target = str(flat["model"].value)
    who_drafts = _speculation(flat, target, _table()["speculative"])
    return _without_contradictions([who_drafts.get(key) or _by_rule(entry) for key, entry in flat.items()])


def kind_of_file(entries: Iterable[Entry]) -> str:
    """Returns what kind of file this is, such as an orchestrator's, and what to do; "" if a model server may read it.

    Each kind is recognised by keys that only its files have: `files` in keys.yaml, where * matches anything.
    """
    for entry in entries:
        for kind in _table()["files"]:
            if any(fnmatchcase(entry.key, pattern) for pattern in kind["keys"]):
                return f"{entry.source}: {entry.key.partition('.')[0]}: this is {kind['is']}: {kind['note']}"
    return ""


def _without_contradictions(keys: Sequence[Translated]) -> list[Translated]:
    """If keys (of vLLM and TensorRT-LLM) set a setting differently, keeps the last key; the others become warnings."""
    last = {name: key for key in keys for name in key.settings}
    found = []
    for key in keys:
        kept = {name: value for name, value in key.settings.items() if last[name].settings[name] == value}
        others = [last[name].entry for name in key.settings if name not in kept]
        note = "".join(f"{entry.key} in {entry.source} is used instead" for entry in others[:1])
        found.append(replace(key, kind=Kind.WARNING, note=note, settings=kept) if others else key)
    return found


def _flattened(entries: Iterable[Entry]) -> Iterator[Entry]:
    """Replaces dashes in keys with underscores, and groups given as one value (JSON text or a dict) with their keys."""
    entries = list(entries)
    of_adapters = tuple(f"{each.key}." for each in entries if each.is_group and each.key.replace("-", "_") in ADAPTERS)
    for entry in entries:
        key, value = entry.key.replace("-", "_"), entry.value
        if entry.key.startswith(of_adapters):
            continue
        if key in ADAPTERS:  # the keys in such a group are adapters' names
            prefix = f"{entry.key}."
            inner = {each.key.removeprefix(prefix): each.value for each in entries if each.key.startswith(prefix)}
            yield replace(entry, key=key, value=inner or value, is_group=False)
            continue
        if isinstance(value, str) and (key == SPECULATIVE or value.lstrip().startswith("{")):  # JSON, as in flags
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
    """Parses a text as YAML. vLLM does so too, because it turns its file into flags. So "16" and "false" are not text.

    Raises: ValueError if the text is not YAML.
    """
    if not isinstance(value, str):
        return value
    import yaml

    try:
        return yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ValueError(f"{value!r} is not a value") from error


@cache
def _table() -> dict[str, Any]:
    import yaml

    return dict(yaml.safe_load(Path(__file__).with_name("keys.yaml").read_text(encoding="utf-8")))


@cache
def rules() -> Mapping[str, Rule]:
    """Returns the rules by key. The rule of "moe_config.*" is for every key of the group `moe_config`."""
    return {
        key: Rule(kind=kind, **{name: value for name, value in item.items() if name != "keys"})
        for kind in (Kind.SET, Kind.ERROR, Kind.WARNING)
        for item in _table()[kind.value]
        for key in item["keys"]
    }


def has_rule(key: str) -> bool:
    """Returns whether there is a rule for this key, that is, whether files of other servers have it."""
    return key.replace("-", "_") in rules()


def _by_rule(entry: Entry) -> Translated:
    """Translates an entry by the rule of its key or group. Without one, the result is an error with the nearest key."""
    parts, value = entry.key.split("."), entry.value
    names = [entry.key, *(".".join((*parts[:end], "*")) for end in range(len(parts), 0, -1))]
    rule = next((rules()[name] for name in names if name in rules()), None)
    try:
        plain = _unquoted(value)
    except ValueError:  # plain text
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
        settings = dict.fromkeys(rule.to, CONVERTERS[rule.by](value if rule.by in UNPARSED else plain))
    except ValueError as error:
        return Translated(entry=entry, kind=Kind.ERROR, note=str(error))
    return Translated(entry=entry, kind=rule.kind, note=rule.note, settings=settings)


def _speculation(flat: Mapping[str, Entry], target: str, names: Mapping[str, Any]) -> dict[str, Translated]:
    """Translates the keys that name the speculation method and its model. All other keys have rules.

    Returns the results by key.

    Args:
        flat: all entries by key.
        target: the served model; empty: unknown.
        names: the part `speculative` of `keys.yaml`.
    """
    whole = flat.get(SPECULATIVE)
    if whole is not None and not whole.value:
        return {SPECULATIVE: Translated(entry=whole, kind=Kind.SET, settings=OFF)}
    group = {key.partition(".")[2]: entry for key, entry in flat.items() if key.startswith(f"{SPECULATIVE}.")}
    if not group:
        return {}
    given = {name: str(entry.value) for name, entry in group.items() if entry.value is not None}
    by = next((name for name in names["models"] if name in given), "")
    of_model = next((name for name in names["models"].get(by, ()) if name in given), "")
    method = group[by] if by else next(iter(group.values()))
    try:
        settings = _draft_settings(given.get(by, ""), given.get(of_model, ""), by, target, names)
    except ValueError as error:
        return {method.key: Translated(entry=method, kind=Kind.ERROR, note=str(error))}
    found = {}
    if of_model and "draft_node.model" in settings:  # the model's key sets the model, the method's key all the rest
        own = {name: settings.pop(name) for name in ("model.head", "draft_node.model") if settings[name]}
        found[group[of_model].key] = Translated(entry=group[of_model], kind=Kind.SET, settings=own)
    return {**found, method.key: Translated(entry=method, kind=Kind.SET, settings=settings)}


def _draft_settings(method: str, model: str, by: str, target: str, names: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings for `method`, the value of the key `by`. `model` may be empty. Raises: ValueError."""
    proposers: Mapping[str, str] = names["methods"]
    if not method:
        raise ValueError(f"{' or '.join(names['models'])} is missing: name one of {', '.join(proposers)}")
    proposer = proposers.get(method.lower())
    if proposer is None:
        (nearest,) = difflib.get_close_matches(method.lower(), proposers, n=1, cutoff=0.0)
        raise ValueError(f"{method} is none of {', '.join(proposers)}; the nearest is {nearest}")
    settings: dict[str, Any] = {"cluster.draft": proposer, "draft_node.proposer": proposer, "model.head": ""}
    if proposer not in ("draft_model", "head"):
        return {**settings, "decode_node.local_lookup": proposer}
    may_be_target = method.lower() in names["of_target"]
    model = model or (target if may_be_target else "")
    if not model:
        wanted = "a model" if proposer == "draft_model" else "the folder of a head"
        wanted += " (or the served model's own folder, as model)" if may_be_target else ""
        raise ValueError(f"{method} needs {names['models'][by][0]}, {wanted}")
    if proposer == "head":
        folder = Path(model).expanduser().absolute()
        if not folder.is_dir():
            raise ValueError(
                f"{model} is not a folder: download the head, and name its folder in {names['models'][by][0]}"
            )
        model = str(folder)
        settings |= {"model.head": model, "decode_node.local_head": True, "cluster.draft_nodes": 0}
    return {
        **settings,
        "cluster.draft": f"{proposer}:{model}",
        "draft_node.model": model,
        "decode_node.local_lookup": "none",
    }


def _percent(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= MAX_SHARE:
        raise ValueError(f"{value!r} is not a share of the memory above 0 and at most {MAX_SHARE}")
    return f"{100 * value:g}%"


def _only_name(value: Any) -> Any:
    if isinstance(value, list) and len(value) != 1:
        raise ValueError(f"a model is served under one name, not {len(value)}")
    return value[0] if isinstance(value, list) else value


def _adapters(value: Any) -> str:
    """Converts paths by name, or a list of NAME=PATH, of objects of name and path, or of SGLang's nameless paths."""
    found = []
    if isinstance(value, Mapping) and not value.keys() & {"path", "lora_path"}:
        value = [f"{name}={path}" for name, path in value.items()]
    for item in value if isinstance(value, list) else [value]:
        given = _unquoted(item) if str(item).lstrip().startswith("{") else item
        if isinstance(given, Mapping):
            name, path = (given.get(key) or given.get(f"lora_{key}") for key in ("name", "path"))
        else:
            name, separator, path = str(given).partition("=")
            path = path if separator else name
        if not (name and path and Path(path).expanduser().is_dir()):
            raise ValueError(f"{given} is not NAME=PATH of a folder: download the adapter, and name its folder")
        found.append(f"{name}={Path(path).expanduser().absolute()}")
        if "," in found[-1]:
            raise ValueError(f"{found[-1]} has a comma, which separates adapters: link to the folder by another path")
    return ",".join(found)


def _negated(value: Any) -> bool:
    if value not in (True, False):
        raise ValueError(f"{value!r} is neither true nor false")
    return not value


CONVERTERS = {
    "same": lambda value: value,
    "percent": _percent,
    "only_name": _only_name,
    "is_given": lambda value: value is not None,  # a group is turned off by null
    "negated": _negated,
    "adapters": _adapters,
}
"""Converters from another server's value to Outrider's, by name in keys.yaml. Each raises ValueError on failure."""
UNPARSED = ("same", "only_name")
"""Converters that take text as it is, because its type is known only later. The others take the parsed value."""
