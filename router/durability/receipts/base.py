"""The interface of receipt sinks, which are a directory (`directory.py`) and the routers' store (`valkey.py`).

`keeper.py` makes receipts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ReceiptLine:
    request_id: str
    line: bytes  # from `Receipt.to_line`


class ReceiptSink(Protocol):
    """A destination of receipts. Owned by the event loop; only one call of `write` runs at a time."""

    name: str
    """The sink's name for logs, without a password."""

    async def write(self, lines: Sequence[ReceiptLine]) -> Mapping[str, int]:
        """Writes receipts and removes the oldest ones beyond the sink's bound.

        Returns the number of receipts that could not be written, by reason. Never raises.
        """

    async def close(self) -> None:
        """Closes the sink. Written receipts stay."""
