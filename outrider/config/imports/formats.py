"""The formats that are understood, from their tables of rules, and how a file gets its format."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.config.imports.base import Entry, Kind, Outcome, Rule
from outrider.config.imports.speculation import OFF, SPECULATIVE, Speculation
from outrider.config.unknown_keys import unknown_key
from outrider.config.yaml_files import open_node
from outrider.errors import ConfigError

if TYPE_CHECKING:
    import yaml

FORMATS = ("tensorrt_llm", "vllm")
ROLES = ("router", "prefill_node", "decode_node", "draft_node")
MAX_SHARE = 0.95  # of kv_cache.memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A server's configuration. A rule for "moe_config.*" is for every key of that group."""

    name: str
    rules: Mapping[str, Rule]
    speculation: Speculation

    def translate(self, entries: Iterable[Entry], *, target: str = "") -> list[Outcome]:
        """`target`: the served model, with which a head may come; empty: the one that the entries name."""
        entries = list(entries)
        speculative = [entry for entry in entries if entry.key.startswith(f"{SPECULATIVE}.")]
        if not target:
            target = next((str(entry.value) for entry in entries if entry.key == "model"), "")
        outcomes = self.speculation.translate(speculative, target, self._by_rule) if speculative else []
        for entry in entries:
            if entry.key == SPECULATIVE and not entry.value:
                outcomes.append(Outcome(entry=entry, kind=Kind.SET, settings=OFF))
            elif entry not in speculative:
                outcomes.append(self._by_rule(entry))
        return sorted(outcomes, key=lambda outcome: entries.index(outcome.entry))

    def rule_of(self, key: str) -> Rule | None:
        """The key's own rule, or that of its group."""
        parts = key.split(".")
        names = [key, *(".".join((*parts[:end], "*")) for end in range(len(parts), 0, -1))]
        return next((self.rules[name] for name in names if name in self.rules), None)

    def _by_rule(self, entry: Entry) -> Outcome:
        """An error with the nearest key where there is no rule."""
        rule = self.rule_of(entry.key)
        if rule is not None:
            return rule.apply(entry)
        *owner, name = entry.key.split(".")
        known = [key.split(".") for key in self.rules]
        beside = {key[len(owner)] for key in known if key[: len(owner)] == owner and len(key) > len(owner)}
        note = unknown_key("", name, ".".join(owner), sorted(beside)).removeprefix(": ")
        return Outcome(entry=entry, kind=Kind.ERROR, note=note)


@cache
def open_format(name: str) -> Format:
    """One of `FORMATS`."""
    import yaml

    table = yaml.safe_load(Path(__file__).with_name(f"{name}.yaml").read_text(encoding="utf-8"))
    speculation = Speculation(**table["speculative"])
    rules = dict.fromkeys(speculation.keys, Rule(note="nothing that this method has"))
    rules[SPECULATIVE] = Rule(otherwise=Kind.ERROR, note="it is a group of keys")
    for kind, part in ((Kind.ERROR, table["only"]), (Kind.WARNING, table["ignored"])):
        for item in part:
            rule = Rule(allowed=tuple(item.get("allowed", ())), otherwise=kind, note=item["note"])
            rules |= dict.fromkeys(item["keys"], rule)
    for key, item in table["sets"].items():
        settings = item["to"] if isinstance(item["to"], list) else [item["to"]]
        convert = CONVERTERS[item.get("by", "same")]
        rules[key] = Rule(
            settings=tuple(settings), convert=convert, takes_null=convert is _is_given, note=item.get("note", "")
        )
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


def _is_given(value: Any) -> bool:
    """Whether a group is there at all: null turns it off."""
    return value is not None


def _negated(value: Any) -> bool:
    if value not in (True, False):
        raise ValueError(f"{value!r} is neither true nor false")
    return not value


CONVERTERS = {
    "same": lambda value: value,
    "percent": _percent,
    "number": _number,
    "only_name": _only_name,
    "is_given": _is_given,
    "negated": _negated,
}
"""From a value of another server to ours, by the name in the tables. Each raises ValueError for what cannot be."""


def parse_reference(text: str) -> tuple[str | None, Path]:
    """`prefill=FILE` → ("prefill_node", FILE); FILE alone is for all services."""
    name, equals, path = text.partition("=")
    role = next((role for role in ROLES if name in (role, role.removesuffix("_node"))), None)
    return (role, Path(path)) if equals and role else (None, Path(text))


def read_import(path: Path, *, target: str = "") -> tuple[Format, list[Outcome]]:
    """The format that knows most of a file's keys, and what became of each.

    Raises: ConfigError for a file that cannot be read.
    """
    with open_node(path) as (loader, node):
        entries = [] if node is None else list(_entries(loader, node, "", path))
    formats = map(open_format, FORMATS)
    best = max(formats, key=lambda each: sum(each.rule_of(entry.key) is not None for entry in entries))
    return best, best.translate(entries, target=target)


def _entries(loader: yaml.SafeLoader, node: yaml.Node, prefix: str, path: Path) -> Iterator[Entry]:
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
            yield from _entries(loader, value_node, f"{key}.", path)
            continue
        value = loader.construct_object(value_node, deep=True)
        if key == SPECULATIVE and isinstance(value, str):
            value = yaml.safe_load(value)  # JSON, as of the flag
        yield from flattened(value, f"{path}:{line}", key)


def flattened(value: Any, source: str, key: str) -> list[Entry]:
    """The entries of a value that has no lines of its own, such as a flag's JSON."""
    if not isinstance(value, Mapping) or not value:
        return [Entry(key=key, value=value, source=source)]
    return [
        entry
        for name, inner in value.items()
        for entry in flattened(inner, source, f"{key}.{str(name).replace('-', '_')}")
    ]
