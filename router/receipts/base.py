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
    """Owned by the event loop. One `write` at a time."""

    name: str
    """For logs, without a password."""

    async def write(self, lines: Sequence[ReceiptLine]) -> Mapping[str, int]:
        """Keeps them, and drops the oldest beyond the bound. How many are lost, by reason; never raises."""

    async def close(self) -> None:
        """What was written stays."""
