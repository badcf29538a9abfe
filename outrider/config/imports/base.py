"""One translation for all formats: a table of rules says what each key of another server's file is here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from outrider.config.unknown_keys import unknown_key
from outrider.errors import ConfigError

SPECULATIVE = "speculative_config"


class Kind(Enum):
    """What became of a key."""

    SET = "set"
    SAME = "same"  # it asks for what is done anyway
    WARNING = "warning"  # ignored: it concerns speed only
    ERROR = "error"  # cannot be honoured, and would change answers or is required


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One key of a file, or one flag. Groups are flattened: `kv_cache_config.dtype`."""

    key: str
    value: Any
    source: str  # "trt.yaml:3"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one entry."""

    entry: Entry
    kind: Kind
    settings: Mapping[str, Any] = field(default_factory=dict)  # ours, by key; empty unless kind is SET
    note: str = ""

    def __str__(self) -> str:
        return f"{self.origin}: {self.note}"

    @property
    def origin(self) -> str:
        """File, line and key, as `outrider config` shows them."""
        return f"{self.entry.source} {self.entry.key}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What a key is here: `settings`, which get the converted value, or none that it could become.

    `convert` raises ValueError for a value that cannot be honoured. Without settings, `allowed` are the values that
    ask for what is done anyway; any other is of kind `otherwise`. Null is the format's default, unless `takes_null`.
    """

    settings: tuple[str, ...] = ()
    convert: Callable[[Any], Any] = lambda value: value
    allowed: tuple[Any, ...] = ()
    otherwise: Kind = Kind.WARNING
    note: str = ""
    takes_null: bool = False

    def apply(self, entry: Entry) -> Outcome:
        if entry.value is None and not self.takes_null:
            return Outcome(entry=entry, kind=Kind.SAME, note="the default")
        if not self.settings:
            kind = Kind.SAME if entry.value in self.allowed else self.otherwise
            return Outcome(entry=entry, kind=kind, note=self.note)
        try:
            value = self.convert(entry.value)
        except ValueError as error:
            return Outcome(entry=entry, kind=Kind.ERROR, note=str(error))
        return Outcome(entry=entry, kind=Kind.SET, settings=dict.fromkeys(self.settings, value), note=self.note)


def sets(*settings: str, convert: Callable[[Any], Any] = lambda value: value, note: str = "") -> Rule:
    """A key that is one of our settings, or several."""
    return Rule(settings=settings, convert=convert, note=note)


def only(*allowed: Any, note: str) -> Rule:
    """A key of which other values than these cannot be honoured."""
    return Rule(allowed=allowed, otherwise=Kind.ERROR, note=note)


def ignored(note: str, *allowed: Any) -> Rule:
    """A key that concerns speed only. `allowed`: what is done anyway, without a warning."""
    return Rule(allowed=allowed, note=note)


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A server's configuration. A rule for "moe_config.*" is for every key of that group."""

    name: str
    rules: Mapping[str, Rule]
    speculative: Callable[[Sequence[Entry], str], list[Outcome]]  # of the keys of speculative_config, and the target

    def translate(self, entries: Iterable[Entry], *, target: str = "") -> list[Outcome]:
        """`target`: the served model, from whose folder a head may come."""
        outcomes, speculative = [], []
        for entry in entries:
            if entry.key.startswith(f"{SPECULATIVE}."):
                speculative.append(entry)
            elif entry.key == SPECULATIVE:
                outcomes.append(_no_speculation(entry))
            else:
                outcomes.append(apply_rules(self.rules, entry))
        return outcomes + (self.speculative(speculative, target) if speculative else [])


def _no_speculation(entry: Entry) -> Outcome:
    """Of a `speculative_config` without keys."""
    if entry.value:
        return Outcome(entry=entry, kind=Kind.ERROR, note=f"is a group of keys, not {entry.value!r}")
    settings = {"cluster.draft": "none", "decode_node.num_speculative_tokens": 0, "model.head": ""}
    return Outcome(entry=entry, kind=Kind.SET, settings=settings)


def apply_rules(rules: Mapping[str, Rule], entry: Entry) -> Outcome:
    """By the key's rule, or that of its group; an error with the nearest key where there is none."""
    owner = entry.key
    names = [owner]
    while owner:
        names.append(f"{owner}.*")
        owner = owner.rpartition(".")[0]
    rule = next((rules[name] for name in names if name in rules), None)
    if rule is not None:
        return rule.apply(entry)
    owner, _, name = entry.key.rpartition(".")
    known = {key[len(owner) :].lstrip(".").partition(".")[0] for key in rules if key.startswith(owner)}
    note = unknown_key(entry.source, name, owner, sorted(known)).removeprefix(f"{entry.source}: ")
    return Outcome(entry=entry, kind=Kind.ERROR, note=note)


def flattened(value: Any, source: str, prefix: str) -> list[Entry]:
    """The entries of a value that has no lines of its own, such as a flag's JSON."""
    if not isinstance(value, Mapping) or not value:
        return [Entry(key=prefix, value=value, source=source)]
    return [
        entry
        for name, inner in value.items()
        for entry in flattened(inner, source, f"{prefix}.{str(name).replace('-', '_')}")
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """A translated file, or flags, without errors."""

    outcomes: Sequence[Outcome]

    def __post_init__(self) -> None:
        """Raises: ConfigError."""
        errors = [outcome for outcome in self.outcomes if outcome.kind is Kind.ERROR]
        if errors:
            rest = f" (and {len(errors) - 1} more, which `outrider config import` lists)" if errors[1:] else ""
            raise ConfigError(f"{errors[0]}{rest}")

    @property
    def warnings(self) -> list[str]:
        return [str(outcome) for outcome in self.outcomes if outcome.kind is Kind.WARNING]

    @property
    def overrides(self) -> list[str]:
        """The settings, as `--set` and `Launch.overrides` take them."""
        return [f"{key}={value}" for outcome in self.outcomes for key, value in outcome.settings.items()]
