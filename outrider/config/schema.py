"""A JSON schema of the configuration file, for editors."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.config.settings import Limits, default_of, nested_type, options_of, setting_fields
from outrider.config.values import to_plain

DIALECT = "https://json-schema.org/draft/2020-12/schema"
TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", Path: "string", type(None): "null"}
KEYWORDS = {"at_least": "minimum", "above": "exclusiveMinimum", "at_most": "maximum"}


def config_schema(sections: Mapping[str, type]) -> dict[str, Any]:
    """Of a file with these sections, each of which may be missing or empty. Draft 2020-12."""
    properties = {name: _of_section(kind, default_of(kind, name)) for name, kind in sections.items()}
    return {"$schema": DIALECT, "title": "Outrider's configuration", **_group(properties)}


def _group(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": ["object", "null"], "additionalProperties": False, "properties": properties}


def _of_section(kind: Any, default: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    properties = {}
    for item in setting_fields(kind):
        owner, value = nested_type(hints[item.name]), getattr(default, item.name)
        properties[item.name] = (
            _of_section(owner, default_of(owner, item.name) if value is None else value)
            if owner
            else _of_setting(hints[item.name], value, item.metadata)
        )
    return _group(properties)


def _of_setting(kind: Any, default: Any, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Limits hold for each item of a list."""
    limits: Limits = metadata.get("limits", Limits())
    bounds = {word: getattr(limits, name) for name, word in KEYWORDS.items() if getattr(limits, name) is not None}
    if limits.choices is not None:
        bounds["enum"] = list(limits.choices)
    lists = [typing.get_args(option)[0] for option in options_of(kind) if typing.get_origin(option) is tuple]
    if lists:
        shape: dict[str, Any] = {"type": "array", "items": {"type": TYPES[lists[0]], **bounds}}
    else:
        names = [TYPES[option] for option in options_of(kind)]
        shape = {"type": names[0] if len(names) == 1 else names, **bounds}
    return {**shape, "default": to_plain(default), "description": metadata.get("help", "")}
