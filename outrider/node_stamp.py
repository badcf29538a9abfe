"""The nodes that worked on a request, in the form for its receipt and trailers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

NODES_KEY = "outrider-nodes"
"""Key of the trailer with the value of `format_node_versions`."""
MAX_TEXT = 1024
"""Maximum characters of `format_node_versions`, because all trailers and a status's details share 8 KiB."""
_MAX_PART = 100
"""Maximum characters of a name, role, version or numerics in `format_node_versions`; nodes choose them freely."""


@dataclass(frozen=True, slots=True)
class NodeVersion:
    """A node as it was when it worked on a request.

    Another node computes the same tokens only if its version and numerics are equal.
    """

    name: str
    role: str  # "prefill", "decode"
    version: str
    numerics: str

    def __str__(self) -> str:
        """Returns one line of printable ASCII, without semicolons, and with spaces in the last part only."""
        name, role, version = (
            re.sub(r"[^!-:<-~]", "_", part)[:_MAX_PART] or "-" for part in (self.name, self.role, self.version)
        )
        return f"{name} {role} {version} {re.sub(r'[^ -:<-~]', '_', self.numerics)[:_MAX_PART] or '-'}"


def format_node_versions(stamps: Iterable[NodeVersion]) -> str:
    """Returns at most `MAX_TEXT` characters of printable ASCII, without the nodes that do not fit."""
    text = ""
    for stamp in stamps:
        longer = f"{text}; {stamp}" if text else str(stamp)
        if len(longer) > MAX_TEXT:
            break
        text = longer
    return text


def parse_node_versions(text: str) -> tuple[NodeVersion, ...]:
    """Parses the text of `format_node_versions`; ignores invalid parts."""
    found = (part.split(" ", 3) for part in text.split("; "))
    return tuple(NodeVersion(*parts) for parts in found if len(parts) == 4)
