"""A receipt: what an answer was computed from, what came of it, and which nodes computed it (docs/replay.md).

One line of JSON, so that `jq` reads it. Routers with `router.receipts: DIR` write files of them for `outrider replay`.
It holds prompt and answer as token ids: with the model's tokenizer, texts of users.
"""

from __future__ import annotations

import itertools
import json
import os
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError
from outrider.node_stamp import NodeStamp

FORMAT = 1
"""`receipt` of each line. Fields may be added to a format; readers pass over those that they do not know."""
MAX_LINE_BYTES = 64 << 20
"""Of a receipt: seven million tokens."""
PATTERN = "receipts-*.jsonl"
WHOLE, ABORTED, FAILED = "whole", "aborted", "failed"
"""How an answer ended."""
_MAX_TOKEN_ID = (1 << 32) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiptModel:
    name: str
    revision: str
    fingerprint: str
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiptRouter:
    name: str
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiptSample:
    start_position: int  # of the first token that this call made
    finish_reason: str  # "stop", "length", "aborted"; empty: it had not ended
    token_ids: tuple[int, ...]  # that this call made, or the routers before that it took the answer over from

    @property
    def is_whole(self) -> bool:
        """It ended by its tokens."""
        return self.finish_reason in ("stop", "length")


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    request_id: str
    ended_at: str  # UTC, as "2026-11-23T21:04:05.678901+00:00"
    end: str  # WHOLE, ABORTED or FAILED
    error: str  # the reason of the error that it failed with, as in ErrorInfo; empty otherwise
    e2e_seconds: float
    num_moves: int  # times that work moved from a prefill or decode node
    router: ReceiptRouter
    model: ReceiptModel
    nodes: tuple[NodeStamp, ...]  # that worked on it, in the order of their first use
    request: Mapping[str, Any]  # a GenerateRequest in proto JSON: prompt as token ids, seed, max_tokens and method set
    samples: tuple[ReceiptSample, ...]

    def to_line(self) -> bytes:
        """With its line feed."""
        shown = {"receipt": FORMAT, **_shallow(self)}
        return json.dumps(shown, default=_shallow, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Receipt:
        """Raises: ValueError, which says what is wrong with it."""
        if len(line) > MAX_LINE_BYTES:
            raise ValueError(f"it has more than {MAX_LINE_BYTES} bytes")
        try:
            value = json.loads(line)
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error
        if not isinstance(value, dict) or "receipt" not in value:
            raise ValueError("it is not a JSON object with the field receipt")
        if value["receipt"] != FORMAT:
            raise ValueError(f"receipt is {value['receipt']!r:.20}; this version reads {FORMAT}")
        receipt: Receipt = _decode(value, cls, "")
        if receipt.end not in (WHOLE, ABORTED, FAILED):
            raise ValueError(f"end is {receipt.end[:20]!r}, not {WHOLE}, {ABORTED} or {FAILED}")
        return receipt


def _shallow(value: Any) -> dict[str, Any]:
    return {item.name: getattr(value, item.name) for item in fields(value)}


def _decode(value: Any, kind: Any, path: str) -> Any:
    """JSON as a value of a dataclass, or of the types that the ones here have. Raises: ValueError."""
    if is_dataclass(kind):
        if not isinstance(value, dict):
            raise ValueError(f"{path} is not an object")
        hints = typing.get_type_hints(kind)
        missing = [name for name in hints if name not in value]
        if missing:
            raise ValueError(f"{path}{path and '.'}{missing[0]} is missing")
        found = {name: _decode(value[name], hint, f"{path}{path and '.'}{name}") for name, hint in hints.items()}
        return typing.cast("type[Any]", kind)(**found)
    if typing.get_origin(kind) is tuple:
        inner = typing.get_args(kind)[0]
        if not isinstance(value, list):
            raise ValueError(f"{path} is not a list")
        if inner is int:
            if not all(type(item) is int and 0 <= item <= _MAX_TOKEN_ID for item in value):
                raise ValueError(f"{path} is not a list of token ids")
            return tuple(value)
        return tuple(_decode(item, inner, f"{path}[{index}]") for index, item in enumerate(value))
    expected = dict if typing.get_origin(kind) is not None else (int, float) if kind is float else kind
    if not isinstance(value, expected) or isinstance(value, bool):
        raise ValueError(f"{path} is not of the type {getattr(kind, '__name__', 'object')}")  # noqa: TRY004 a file's
    return value


# ------------------------------------------------------------ files of receipts


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
