"""Text from other processes, made safe to print on a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    """Returns the text on one line, with a question mark for each control character, which a terminal would execute."""
    return "".join(character if character.isprintable() else "?" for character in text)
