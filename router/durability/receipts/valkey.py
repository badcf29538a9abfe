"""Receipts in the store that routers share (`router.receipts: store`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress

from valkey.exceptions import ResponseError

from outrider.errors import StoreError
from router.durability.receipts.base import ReceiptLine
from router.durability.store import scripts
from router.durability.store.valkey import ValkeyServer
from router.store_address import ValkeyAddress

LIFETIME_SECONDS = 24 * 3600
MAX_RECEIPTS = 10_000
MAX_LINE_BYTES = 1 << 20
MAX_WRITE_BYTES = 1 << 20
"""Maximum bytes of receipts in one round trip, so that the server answers within milliseconds."""
_PREFIX = "outrider:{receipts}:of:"
_INDEX = "outrider:{receipts}:index"


class ValkeyReceipts(ValkeyServer):
    """A `ReceiptSink` on a server. It keeps the last receipt of each request id for `LIFETIME_SECONDS`, and at most
    `MAX_RECEIPTS` receipts.
    """

    def __init__(
        self,
        address: ValkeyAddress,
        *,
        timeout_seconds: float,
        max_receipts: int = MAX_RECEIPTS,
        lifetime_seconds: float = LIFETIME_SECONDS,
    ) -> None:
        super().__init__(address, timeout_seconds=timeout_seconds)
        self._bounds = round(lifetime_seconds * 1e3), max_receipts, _PREFIX

    async def write(self, lines: Sequence[ReceiptLine]) -> Mapping[str, int]:
        lost: Counter[str] = Counter()
        batch: list[ReceiptLine] = []
        for each in lines:
            if len(each.line) > MAX_LINE_BYTES:
                lost[f"larger than {MAX_LINE_BYTES} bytes"] += 1
                continue
            if sum(len(other.line) for other in batch) + len(each.line) > MAX_WRITE_BYTES:
                await self._write_batch(batch, lost)
                batch = []
            batch.append(each)
        await self._write_batch(batch, lost)
        return lost

    async def _write_batch(self, batch: Sequence[ReceiptLine], lost: Counter[str]) -> None:
        calls = [((_INDEX, _PREFIX + each.request_id), (each.request_id, each.line, *self._bounds)) for each in batch]
        try:
            answers = await self._run_pipeline(scripts.ADD_RECEIPT, calls)
        except StoreError as error:  # some receipts may have been written
            lost[error.message] += len(batch)
        else:
            lost.update(str(answer) for answer in answers if isinstance(answer, ResponseError))

    async def find(self, request_id: str) -> bytes | None:
        """Returns the line of a request's latest receipt. Raises: StoreError."""
        async with self._answering():
            found: bytes | None = await self._server.get(_PREFIX + request_id)
            return found

    async def close(self) -> None:
        with suppress(StoreError):
            await super().close()
