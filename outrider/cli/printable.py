"""Text from other processes, made safe to print on a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    """On one line, with a question mark for each control character, which a terminal would obey."""
    return "".join(character if character.isprintable() else "?" for character in text)
