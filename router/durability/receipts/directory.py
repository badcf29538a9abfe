"""Receipts in files of a directory that routers may share (`outrider.receipt` reads them)."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from outrider.errors import ConfigError
from outrider.receipt import MAX_LINE_BYTES, PATTERN, segment_name
from outrider.segment_files import SEGMENTS_IN_BOUND, SegmentWriter
from router.durability.receipts.base import ReceiptLine


class DirectoryReceipts:
    """A `ReceiptSink` of at most `max_bytes` in all; the oldest segment is removed first."""

    def __init__(self, folder: Path, *, max_bytes: int, incarnation: bytes) -> None:
        """Raises: ConfigError if the directory cannot be written to."""
        numbers = itertools.count()
        self.name = str(folder)
        self._max_line_bytes = min(max_bytes // SEGMENTS_IN_BOUND, MAX_LINE_BYTES)
        try:
            self._segments = SegmentWriter(
                folder,
                pattern=PATTERN,
                next_name=lambda: segment_name(incarnation, next(numbers)),
                max_bytes=max_bytes,
            )
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise ConfigError(
                f"router.receipts {folder} cannot be written to: {error.strerror}; name another directory"
            ) from error

    async def write(self, lines: Sequence[ReceiptLine]) -> Mapping[str, int]:
        return await asyncio.to_thread(self._append, lines)

    def _append(self, lines: Sequence[ReceiptLine]) -> Mapping[str, int]:
        lost: Counter[str] = Counter()
        for each in lines:
            if len(each.line) > self._max_line_bytes:
                lost[f"larger than {self._max_line_bytes} bytes"] += 1
                continue
            try:
                self._segments.append(each.line)
            except OSError as error:
                lost[error.strerror or str(error)] += 1
        return lost

    async def close(self) -> None:
        self._segments.close()
