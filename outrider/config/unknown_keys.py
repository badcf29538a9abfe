"""What is said of a key that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


def unknown_key(source: str, name: str, owner: str, known: Sequence[str], rest: tuple[str, ...] = ()) -> str:
    """The message for a key that is not known: where it stands, and the nearest of those known."""
    prefix = f"{owner}." if owner else ""
    key = ".".join((prefix + name, *rest))
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    hint = f"; the nearest is {prefix}{nearest[0]}" if nearest else f"; {owner} has no settings of its own"
    return f"{source}: unknown key {key}{hint}"
