"""Receipts in files: what a router with `router.receipts: DIR` writes, and `outrider replay` reads."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path

from outrider.errors import ConfigError
from outrider.receipt import MAX_LINE_BYTES, Receipt

PATTERN = "receipts-*.jsonl"


def segment_name(incarnation: bytes, number: int) -> str:
    """Of a router's file: in the order of their names, those of one router are in the order of their time."""
    return f"receipts-{incarnation.hex()}-{number:06}.jsonl"


def read_receipts(path: Path, request_id: str | None = None) -> Iterator[Receipt]:
    """All of a file, or those of one request, as they stand when this is called. Raises: ConfigError.

    A last line that has no end yet, or never had one, is passed over unless it is a receipt.
    """
    wanted = b"" if request_id is None else json.dumps(request_id).encode()  # as it stands in its line
    for number, line in _lines(path):
        if wanted not in line:
            continue
        try:
            receipt = Receipt.from_line(line)
        except ValueError as error:
            if line.endswith(b"\n"):
                raise ConfigError(f"{path}, line {number}: no receipt: {error}") from error
            continue
        if request_id in (None, receipt.request_id):
            yield receipt


def find_receipt(folder: Path, request_id: str) -> Receipt | None:
    """The newest of a request id. Raises: ConfigError."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a directory with receipts")
    paths = (path for path in folder.glob(PATTERN) if path.is_file())  # to open a pipe would wait for its writer
    found = (receipt for path in paths for receipt in read_receipts(path, request_id))
    return max(found, key=lambda receipt: receipt.ended_at, default=None)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number, line) with their ends, one in memory at a time. Raises: ConfigError."""
    try:
        with path.open("rb") as file:
            left = os.fstat(file.fileno()).st_size  # a router that computes replays appends their receipts meanwhile
            for number in itertools.count(1):
                line = file.readline(min(left, MAX_LINE_BYTES + 1))
                left -= len(line)
                if len(line) > MAX_LINE_BYTES:
                    raise ConfigError(f"{path}, line {number}: no receipt: it has more than {MAX_LINE_BYTES} bytes")
                if not line:
                    return
                if line.strip():
                    yield number, line
    except FileNotFoundError:
        return  # a router that is running has removed its oldest
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
