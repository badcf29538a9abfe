"""Converts text from files and variables to values of the declared types, and back."""

from __future__ import annotations

import re
import typing
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from outrider.config.settings import SettingInfo, options_of, setting_fields
from outrider.config.yaml_files import Entry
from outrider.errors import ConfigError


def is_null(value: Any) -> bool:
    """Returns whether this value, from a variable, flag or file, leaves an optional setting empty."""
    return str(value).strip().lower() in ("null", "none", "~", "")


def from_text(kind: Any, text: str, source: str) -> Any:
    """Converts a variable, a flag or quoted text to a field's type.

    The value of a text field is kept as it is; other values are parsed as YAML.

    Raises: ConfigError.
    """
    options = options_of(kind)
    if type(None) in options and is_null(text):
        return None
    if str in options or Path in options:
        return text
    items = [typing.get_args(option)[0] for option in options if typing.get_origin(option) is tuple]
    if items and not text.startswith("- "):
        return [_item_from_text(items[0], part, source) for part in _parts(text)]
    size = re.fullmatch(r"\s*(\d+(?:\.\d+)?)([kmgt]|[KMGT](?:iB)?)\s*", text) if int in options else None
    if size is not None:  # vLLM's units: 4k is 4000, 4K is 4096
        base, unit = (1000 if size[2].islower() else 1024), size[2][0].lower()
        return round(float(size[1]) * base ** ("kmgt".index(unit) + 1))
    import yaml

    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{source}: not a value: {text!r}") from error
    return bool(value) if kind is bool and value in (0, 1) else value


def _parts(text: str) -> list[str]:
    """Splits a list, with or without outer brackets, at commas outside quotes and inner brackets (`[::1]:50051`)."""
    inner = re.fullmatch(r"\[((?:[^\[\]]|\[[^\[\]]*\])*)\]", text.strip())
    found = re.findall(r"""(?:"[^"]*"|'[^']*'|\[[^\]]*\]|[^,])+""", text if inner is None else inner[1])
    return [part.strip() for part in found if part.strip()]


def _item_from_text(kind: Any, text: str, source: str) -> Any:
    is_quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "\"'"
    return from_text(kind, text[1:-1] if is_quoted else text, source)


def checked(info: SettingInfo, entry: Entry) -> Any:
    """Returns the entry's value in the declared type. Raises: ConfigError that names the type or the range."""
    allowed = f" {info.limits}" if str(info.limits) else ""
    given = f"{entry.source}: {info.key} = {entry.value!r}"
    for option in options_of(info.kind):
        try:
            converted = _convert(entry.value, option)
        except (TypeError, ValueError, OverflowError):
            continue
        parts = converted if isinstance(converted, tuple) else (converted,)
        if all(info.limits.allow(part) for part in parts):
            return converted
        raise ConfigError(f"{given} is out of range: must be{allowed or ' finite'}")
    raise ConfigError(f"{given} is not of type {info.type_name}{allowed and f': must be{allowed}'}")


def _convert(value: Any, kind: Any) -> Any:
    """Converts the value to one type. A bool is not a number. Raises: TypeError, ValueError, OverflowError."""
    if typing.get_origin(kind) is tuple and isinstance(value, (list, tuple)):
        return tuple(_convert(part, typing.get_args(kind)[0]) for part in value)
    if kind is float and not isinstance(value, bool):
        return float(value)  # also from a string, because YAML 1.1 reads 1e-3 as a string
    if kind is int and not isinstance(value, int) and (number := float(value)).is_integer():
        return int(number)  # Helm writes 1e+06 for a million
    if kind is Path and isinstance(value, str):
        return Path(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError
    return value


def format_value(value: Any) -> str:
    """Formats a value as YAML on one line, without passwords in URLs."""
    import yaml

    return without_passwords(
        yaml.safe_dump(to_plain(value), default_flow_style=True, width=10_000, allow_unicode=True)
        .split("\n...")[0]
        .strip()
    )


def without_passwords(text: str) -> str:
    """Replaces every `scheme://user:password@` in the text with `scheme://user:…@`."""
    return re.sub(r"(://[^/@:\s]*:)\S*@", r"\1…@", text)


def to_plain(value: Any) -> Any:
    """Converts sections, tuples and paths to dicts, lists and strings."""
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: to_plain(getattr(value, item.name)) for item in setting_fields(value)}
    if isinstance(value, (tuple, list)):
        return [to_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
