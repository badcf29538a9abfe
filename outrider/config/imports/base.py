"""What becomes of each key of another server's configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from outrider.errors import ConfigError

SPECULATIVE = "speculative_config"


class Kind(Enum):
    """What became of a key."""

    SET = "set"
    SAME = "same"  # it asks for what is done anyway
    WARNING = "warning"  # ignored: it concerns speed only
    ERROR = "error"  # cannot be honoured, and would change answers or is required


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignKey:
    """One key of a file, or one flag, and what became of it. Groups are flattened: `kv_cache_config.dtype`."""

    key: str
    value: Any
    source: str  # "trt.yaml:3"
    kind: Kind = Kind.SAME
    settings: Mapping[str, Any] = field(default_factory=dict)  # ours, by key
    note: str = ""

    def became(self, kind: Kind, note: str = "", settings: Mapping[str, Any] | None = None) -> ForeignKey:
        return replace(self, kind=kind, note=note, settings=settings or {})

    @property
    def origin(self) -> str:
        """File, line and key, as `outrider config` shows them."""
        return f"{self.source} {self.key}"

    def __str__(self) -> str:
        return f"{self.origin}: {self.note}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """A translated file, or flags, without errors."""

    keys: Sequence[ForeignKey]

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
