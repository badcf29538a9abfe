"""What becomes of each key of another server's configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from outrider.errors import ConfigError


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

    @property
    def origin(self) -> str:
        """File, line and key, as `outrider config` shows them."""
        return f"{self.entry.source} {self.entry.key}"

    def __str__(self) -> str:
        return f"{self.origin}: {self.note}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What a key is here: `settings`, which get the converted value, or none that it could become.

    `convert` raises ValueError for a value that cannot be honoured. Without settings, `allowed` are the values that
    ask for what is done anyway; any other is of kind `otherwise`. Null is the default, unless a converter takes it.
    """

    settings: tuple[str, ...] = ()
    convert: Callable[[Any], Any] = lambda value: value
    takes_null: bool = False
    allowed: tuple[Any, ...] = ()
    otherwise: Kind = Kind.WARNING
    note: str = ""

    def apply(self, entry: Entry) -> Outcome:
        if entry.value is None and not self.takes_null:
            return Outcome(entry=entry, kind=Kind.SAME, note="the default")
        if not self.settings:
            if entry.value in self.allowed:
                return Outcome(entry=entry, kind=Kind.SAME)
            return Outcome(entry=entry, kind=self.otherwise, note=self.note)
        try:
            value = self.convert(entry.value)
        except ValueError as error:
            return Outcome(entry=entry, kind=Kind.ERROR, note=str(error))
        return Outcome(entry=entry, kind=Kind.SET, settings=dict.fromkeys(self.settings, value), note=self.note)


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
