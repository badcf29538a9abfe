"""What is said of a key that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Collection


def unknown_key(key: str, known: Collection[str]) -> str:
    """The key as far as it is known, and the nearest of those that could stand there."""
    names, owner = key.split("."), ""
    for name in names:
        beside = {other.removeprefix(owner).partition(".")[0] for other in known if other.startswith(owner)}
        if name not in beside:
            break
        owner += f"{name}."
    nearest = difflib.get_close_matches(name, sorted(beside), n=1, cutoff=0.0)
    hint = f"the nearest is {owner}{nearest[0]}" if nearest else f"{owner[:-1]} has no settings of its own"
    return f"unknown key {owner}{name}; {hint}"
