"""Where receipts are kept. `keeper.py` makes them; a directory (`directory.py`) or the routers' store holds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ReceiptLine:
    request_id: str
    line: bytes  # as `Receipt.to_line` gives it


class ReceiptSink(Protocol):
    """Where receipts are written to. Owned by the event loop, which calls `write` once at a time."""

    name: str
    """For logs, without a password."""

    async def write(self, lines: Sequence[ReceiptLine]) -> Mapping[str, int]:
        """Writes receipts, and removes the oldest ones beyond the bound.

        Returns how many could not be written, by reason. Never raises.
        """

    async def close(self) -> None:
        """What was written stays."""
