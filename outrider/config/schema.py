"""A JSON schema of the configuration file, for editors."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.config.settings import SettingInfo, describe_settings, options_of
from outrider.config.values import to_plain

DIALECT = "https://json-schema.org/draft/2020-12/schema"
TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", Path: "string", type(None): "null"}
KEYWORDS = {"at_least": "minimum", "at_most": "maximum"}


def config_schema(sections: Mapping[str, type]) -> dict[str, Any]:
    """Returns the schema (draft 2020-12) of a file with these sections, each of which may be missing or empty."""
    root = _group()
    for info in describe_settings(sections):
        *groups, name = info.key.split(".")
        owner = root
        for group in groups:
            owner = owner["properties"].setdefault(group, _group())
        owner["properties"][name] = _of_setting(info)
    return {"$schema": DIALECT, "title": "Outrider's configuration", **root}


def _group() -> dict[str, Any]:
    return {"type": ["object", "null"], "additionalProperties": False, "properties": {}}


def _of_setting(info: SettingInfo) -> dict[str, Any]:
    """Returns the schema of one setting. Limits apply to each item of a list."""
    limits, options = info.limits, options_of(info.kind)
    bounds = {word: getattr(limits, name) for name, word in KEYWORDS.items() if getattr(limits, name) is not None}
    if limits.choices is not None:
        bounds["enum"] = list(limits.choices)
    lists = [typing.get_args(option)[0] for option in options if typing.get_origin(option) is tuple]
    if lists:
        shape: dict[str, Any] = {"type": "array", "items": {"type": TYPES[lists[0]], **bounds}}
    else:
        names = [TYPES[option] for option in options]
        shape = {"type": names[0] if len(names) == 1 else names, **bounds}
    return {**shape, "default": to_plain(info.default), "description": info.help}
