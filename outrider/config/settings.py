"""Declarations of settings, and their descriptions."""

from __future__ import annotations

import difflib
import math
import types
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, is_dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The allowed values of one setting."""

    at_least: float | None = None
    at_most: float | None = None
    choices: tuple[Any, ...] | None = None

    def allow(self, value: Any) -> bool:
        """Returns whether a value, already of the right type, is allowed. Numbers must also be finite."""
        if self.choices is not None and value not in self.choices:
            return False
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return True
        return (
            math.isfinite(value)
            and (self.at_least is None or value >= self.at_least)
            and (self.at_most is None or value <= self.at_most)
        )

    def __str__(self) -> str:
        if self.choices is not None:
            return "one of " + ", ".join(str(choice) for choice in self.choices)
        bounds = [(self.at_least, "at least"), (self.at_most, "at most")]
        return " and ".join(f"{word} {bound}" for bound, word in bounds if bound is not None)


def setting(
    default: Any,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    choices: Sequence[Any] | None = None,
    help: str = "",  # noqa: A002 the word that argparse users know
) -> Any:
    """Returns a dataclass field with its range and help text."""
    limits = Limits(at_least=at_least, at_most=at_most, choices=None if choices is None else tuple(choices))
    return field(default=default, metadata={"limits": limits, "help": help})


def fixed(default: Any) -> Any:
    """Returns a dataclass field that is not a setting: it is the same for every user, and differs only in tests."""
    return field(default=default, metadata={"is_setting": False})


def setting_fields(section: Any) -> list[Field[Any]]:
    """Returns the fields of a section, or of its type, that users may set."""
    return [item for item in fields(section) if item.metadata.get("is_setting", True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingInfo:
    """What files, `--help` and the schema say about a key."""

    key: str
    kind: Any  # its declared type
    default: Any
    limits: Limits
    help: str

    @property
    def type_name(self) -> str:
        return self.kind.__name__ if isinstance(self.kind, type) and not typing.get_args(self.kind) else str(self.kind)


def describe_settings(sections: Mapping[str, type]) -> list[SettingInfo]:
    """Returns every key of the sections, in declaration order."""
    return [info for name, kind in sections.items() for info in _described(name, kind())]


def _described(prefix: str, section: Any) -> Iterator[SettingInfo]:
    hints = typing.get_type_hints(type(section))
    for item in setting_fields(section):
        key, value = f"{prefix}.{item.name}", getattr(section, item.name)
        if is_dataclass(value):
            yield from _described(key, value)
            continue
        limits, text = item.metadata.get("limits", Limits()), item.metadata.get("help", "")
        yield SettingInfo(key=key, kind=hints[item.name], default=value, limits=limits, help=text)


FORMER_KEYS = {
    "decode_node.draft_trees": "drafts are always trees when that pays",
    "decode_node.keep_features": "it is decode_node.keep_answers now",
    "decode_node.local_fallback": "it is decode_node.local_lookup now",
    "decode_node.transfer_timeout_seconds": "it is always 30",
    "draft_node.num_speculative_tokens": "decode_node.num_speculative_tokens limits drafts",
    "gateway.cors_allowed_origins": "gateway.extra_arguments takes --cors-allowed-origins",
    "model.keep_packed": "packed weights are always kept",
    "prefill_node.turn_seconds": "it is always 0.12",
    "router.journal_bytes": "it is router.answer_memory_bytes now",
    "router.max_waiting_tokens": "it is 262,144, or 1,024 times router.max_waiting if that is more",
    "router.timelines": "it is always 256",
    "router.vllm_engine": "the engine service is served wherever smg-grpc-proto is installed",
    "security.operator_name": "it is always outrider-operator",
    "server.max_request_bytes": "it is always 2 MiB",
    "telemetry.profiling": "nodes can always be profiled; with TLS, only services and operators may do that",
}
"""Settings that were removed or renamed, and what replaces them."""


def unknown_key(key: str, known: Collection[str]) -> str:
    """Returns an error message for an unknown key, with its replacement or the nearest key in the same group."""
    if key in FORMER_KEYS:
        return f"{key} is not a setting any more: {FORMER_KEYS[key]}"
    names, owner = key.split("."), ""
    for name in names:
        names_here = {other.removeprefix(owner).partition(".")[0] for other in known if other.startswith(owner)}
        if name not in names_here:
            break
        owner += f"{name}."
    nearest = difflib.get_close_matches(name, sorted(names_here), n=1, cutoff=0.0)
    hint = f"the nearest is {owner}{nearest[0]}" if nearest else f"{owner[:-1]} has no settings of its own"
    return f"unknown key {owner}{name}; {hint}"


def options_of(kind: Any) -> tuple[Any, ...]:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return typing.get_args(kind)
    return (kind,)
