"""Others' words on a terminal."""

from __future__ import annotations


def printable(words: str) -> str:
    """On one line, with question marks for what a terminal would obey."""
    return "".join(character if character.isprintable() else "?" for character in words)
