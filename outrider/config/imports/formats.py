"""The formats that are understood, from their tables of rules, and how a file gets its format."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.config.imports.base import SPECULATIVE, ForeignKey, Kind
from outrider.config.imports.speculation import OFF, Speculation
from outrider.config.unknown_keys import unknown_key
from outrider.config.yaml_files import open_node
from outrider.errors import ConfigError

if TYPE_CHECKING:
    import yaml

FORMATS = ("tensorrt_llm", "vllm")
ROLES = ("router", "prefill_node", "decode_node", "draft_node")
MAX_SHARE = 0.95  # of kv_cache.memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What a key is here, unless its value is one of `allowed`, which ask for what is done anyway."""

    kind: Kind
    note: str = ""
    settings: Sequence[str] = ()  # of kind SET: they get the converted value
    convert: str = "same"  # one of CONVERTERS
    allowed: Sequence[Any] = ()

    def apply(self, key: ForeignKey) -> ForeignKey:
        is_empty = key.value in (None, {}, []) and self.convert != "is_given"  # then it is the default
        if is_empty or any(
            key.value == one and isinstance(key.value, bool) is isinstance(one, bool) for one in self.allowed
        ):
            return key.became(Kind.SAME)
        try:
            settings = dict.fromkeys(self.settings, CONVERTERS[self.convert](key.value))
        except ValueError as error:
            return key.became(Kind.ERROR, str(error))
        return key.became(self.kind, self.note, settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A server's configuration. A rule for "moe_config.*" is for every key of that group."""

    name: str
    rules: Mapping[str, Rule]
    speculation: Speculation

    def translate(self, keys: Sequence[ForeignKey], *, target: str = "") -> list[ForeignKey]:
        """`target`: the served model, with which a head may come; empty: the one that the keys name."""
        inner = [key for key in keys if key.key.startswith(f"{SPECULATIVE}.")]
        target = target or next((str(key.value) for key in keys if key.key == "model"), "")
        found = [self._by_rule(key) for key in keys if key not in inner]
        found += self.speculation.translate(inner, target, self._by_rule) if inner else []
        order = [key.key for key in keys]
        return sorted(found, key=lambda key: order.index(key.key))

    def rule_of(self, key: str) -> Rule | None:
        """The key's own rule, or that of its group."""
        parts = key.split(".")
        names = [key, *(".".join((*parts[:end], "*")) for end in range(len(parts), 0, -1))]
        return next((self.rules[name] for name in names if name in self.rules), None)

    def _by_rule(self, key: ForeignKey) -> ForeignKey:
        """An error with the nearest key where there is no rule."""
        if key.key == SPECULATIVE and not key.value:
            return key.became(Kind.SET, "", OFF)
        rule = self.rule_of(key.key)
        if rule is not None:
            return rule.apply(key)
        if any(name.startswith(f"{key.key}.") for name in self.rules):
            return key.became(Kind.ERROR, "it is a group of keys") if key.value else key.became(Kind.SAME)
        *owner, name = key.key.split(".")
        known = [known.split(".") for known in self.rules]
        beside = {parts[len(owner)] for parts in known if parts[: len(owner)] == owner and len(parts) > len(owner)}
        message = unknown_key("", name, ".".join(owner), sorted(beside))
        return key.became(Kind.ERROR, message.removeprefix(": "))


@cache
def open_format(name: str) -> Format:
    """One of `FORMATS`."""
    import yaml

    table = yaml.safe_load(Path(__file__).with_name(f"{name}.yaml").read_text(encoding="utf-8"))
    speculation = Speculation(**table["speculative"])
    names = (speculation.method, *speculation.model, *speculation.count)
    rules = {f"{SPECULATIVE}.{name}": Rule(kind=Kind.WARNING, note="nothing that this method has") for name in names}
    for kind, items in ((Kind.ERROR, table["only"]), (Kind.WARNING, table["ignored"])):
        for item in items:
            rules |= dict.fromkeys(item["keys"], Rule(kind=kind, note=item["note"], allowed=item.get("allowed", ())))
    for key, item in table["sets"].items():
        settings, convert = item["to"].split(), item.get("by", "same")
        rules[key] = Rule(kind=Kind.SET, note=item.get("note", ""), settings=settings, convert=convert)
    return Format(name=name, rules=rules, speculation=speculation)


def _percent(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= MAX_SHARE:
        raise ValueError(f"{value!r} is not a share of the memory above 0 and at most {MAX_SHARE}")
    return f"{100 * value:g}%"


def _number(value: Any) -> Any:
    """As vLLM takes it: 4k is 4000, 4K is 4096."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kK])", value) if isinstance(value, str) else None
    return int(float(match[1]) * (1000 if match[2] == "k" else 1024)) if match else value


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
    "number": _number,
    "only_name": _only_name,
    "is_given": lambda value: value is not None,  # null turns a group off
    "negated": _negated,
}
"""From a value of another server to ours, by the name in the tables. Each raises ValueError for what cannot be."""


def parse_reference(text: str) -> tuple[str | None, Path]:
    """`prefill=FILE` → ("prefill_node", FILE); FILE alone is for all services."""
    name, equals, path = text.partition("=")
    role = next((role for role in ROLES if name in (role, role.removesuffix("_node"))), None)
    return (role, Path(path)) if equals and role else (None, Path(text))


def read_import(path: Path, *, target: str = "") -> tuple[Format, list[ForeignKey]]:
    """The format that knows most of a file's keys, and what became of each.

    Raises: ConfigError for a file that cannot be read.
    """
    with open_node(path) as (loader, node):
        entries = [] if node is None else list(_entries(loader, node, "", path))
    formats = map(open_format, FORMATS)
    best = max(formats, key=lambda each: sum(each.rule_of(entry.key) is not None for entry in entries))
    return best, best.translate(entries, target=target)


def _entries(
    loader: yaml.SafeLoader, node: yaml.Node, prefix: str, path: Path, outer: Sequence[yaml.Node] = ()
) -> Iterator[ForeignKey]:
    """`outer`: the groups around `node`. Raises: ConfigError."""
    import yaml

    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{path}:{node.start_mark.line + 1}: the file is a group of keys")
    lines: dict[str, int] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        key = prefix + str(loader.construct_object(key_node, deep=True)).replace("-", "_")
        if key in lines:
            raise ConfigError(f"{path}:{line}: {key} stands in line {lines[key]} already")
        lines[key] = line
        if isinstance(value_node, yaml.MappingNode) and value_node.value:
            if value_node in (*outer, node):  # by an alias
                raise ConfigError(f"{path}:{line}: {key} contains itself")
            yield from _entries(loader, value_node, f"{key}.", path, (*outer, node))
            continue
        value = loader.construct_object(value_node, deep=True)
        if key == SPECULATIVE and isinstance(value, str):
            value = yaml.safe_load(value)  # JSON, as of the flag
        yield from flattened(value, f"{path}:{line}", key)


def flattened(value: Any, source: str, key: str) -> list[ForeignKey]:
    """The entries of a value that has no lines of its own, such as a flag's JSON."""
    if not isinstance(value, Mapping) or not value:
        return [ForeignKey(key=key, value=value, source=source)]
    return [
        entry
        for name, inner in value.items()
        for entry in flattened(inner, source, f"{key}.{str(name).replace('-', '_')}")
    ]
