"""A key of another server's configuration, and what became of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from outrider.config.yaml_files import Entry
from outrider.errors import ConfigError

SPECULATIVE = "speculative_config"


class Kind(Enum):
    """What became of a key."""

    SET = "set"
    SAME = "same"  # it asks for what is done anyway
    WARNING = "warning"  # ignored: it concerns speed only
    ERROR = "error"  # cannot be honoured, and would change answers or is required


@dataclass(frozen=True, slots=True, kw_only=True)
class Translated:
    """One key of a file, or one argument, and what became of it. Groups are flattened: `kv_cache_config.dtype`."""

    entry: Entry
    kind: Kind
    note: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)  # ours, by key

    @property
    def origin(self) -> str:
        """File, line and key, as `outrider config` shows them."""
        return f"{self.entry.source} {self.entry.key}"

    def __str__(self) -> str:
        return f"{self.origin}: {self.note}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """A translated file, or arguments, without errors."""

    keys: Sequence[Translated]

    def __post_init__(self) -> None:
        """Raises: ConfigError."""
        errors = [key for key in self.keys if key.kind is Kind.ERROR]
        if errors:
            rest = f" (and {len(errors) - 1} more, which `outrider config import` lists)" if errors[1:] else ""
            raise ConfigError(f"{errors[0]}{rest}")

    @property
    def warnings(self) -> list[str]:
        return [str(key) for key in self.keys if key.kind is Kind.WARNING]

    @property
    def overrides(self) -> list[str]:
        """The settings, as `--set` and `Launch.overrides` take them."""
        return [f"{name}={value}" for key in self.keys for name, value in key.settings.items()]
