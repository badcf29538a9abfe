"""Receipts in files: what a router with `router.receipts: DIR` writes, and `outrider replay` reads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from outrider.errors import ConfigError
from outrider.receipt import MAX_LINE_BYTES, Receipt

PATTERN = "receipts-*.jsonl"


def segment_name(incarnation: bytes, number: int) -> str:
    """Of a router's file: in the order of their names, those of one router are in the order of their time."""
    return f"receipts-{incarnation.hex()}-{number:06}.jsonl"


def read_receipts(path: Path) -> Iterator[Receipt]:
    """All of a file. A last line without its end is passed over if it is none. Raises: ConfigError."""
    for number, line in _lines(path):
        try:
            yield Receipt.from_line(line)
        except ValueError as error:
            if line.endswith(b"\n"):
                raise ConfigError(f"{path}, line {number}: no receipt: {error}") from error


def find_receipt(folder: Path, request_id: str) -> Receipt | None:
    """The newest of a request id. Raises: ConfigError."""
    wanted = json.dumps(request_id).encode()  # as it stands in its line
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a directory with receipts")
    newest: Receipt | None = None
    for path in sorted(folder.glob(PATTERN)):
        for number, line in _lines(path):
            if wanted not in line:
                continue
            try:
                receipt = Receipt.from_line(line)
            except ValueError as error:
                if line.endswith(b"\n"):
                    raise ConfigError(f"{path}, line {number}: no receipt: {error}") from error
                continue
            if receipt.request_id == request_id and (newest is None or receipt.ended_at >= newest.ended_at):
                newest = receipt
    return newest


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number, line) with their ends, one in memory at a time. Raises: ConfigError."""
    try:
        with path.open("rb") as file:
            number = 1
            while line := file.readline(MAX_LINE_BYTES + 1):
                if len(line) > MAX_LINE_BYTES:
                    raise ConfigError(f"{path}, line {number}: no receipt: it has more than {MAX_LINE_BYTES} bytes")
                if line.strip():
                    yield number, line
                number += 1
    except FileNotFoundError as error:
        if path.parent.is_dir() and path.match(PATTERN):
            return  # a router that is running has removed its oldest
        raise ConfigError(f"{path}: {error.strerror}") from error
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
