"""A receipt: an answer, everything it was computed from, and the nodes that computed it (docs/replay.md).

A receipt is one line of JSON, so that `jq` can read it. Routers with `router.receipts: DIR` write files of receipts for
`outrider replay`. Receipts contain prompts and answers as token ids, from which anybody with the model's tokenizer can
read the users' texts.
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
from outrider.node_stamp import NodeVersion

FORMAT = 1
"""Value of the field `receipt` in each line. It stays the same if fields are added: readers ignore unknown ones."""
MAX_LINE_BYTES = 64 << 20
"""Maximum bytes of a receipt: enough for seven million tokens."""
PATTERN = "receipts-*.jsonl"
WHOLE, ABORTED, FAILED = "whole", "aborted", "failed"
"""Values of `Receipt.end`: how an answer ended."""
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
    start_position: int  # position of the first token that this call generated
    finish_reason: str  # "stop", "length", "aborted"; empty if the sample has not ended
    token_ids: tuple[int, ...]  # tokens that this call generated, also at routers from which it was taken over

    @property
    def is_whole(self) -> bool:
        """Whether the sample ended by itself, with "stop" or "length"."""
        return self.finish_reason in ("stop", "length")


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    request_id: str
    ended_at: str  # UTC, as "2026-11-23T21:04:05.678901+00:00"
    end: str  # WHOLE, ABORTED or FAILED
    error: str  # the error's reason, as in ErrorInfo; empty unless `end` is FAILED
    e2e_seconds: float
    num_moves: int  # migrations from a prefill or decode node
    router: ReceiptRouter
    model: ReceiptModel
    nodes: tuple[NodeVersion, ...]  # nodes that worked on the request, in the order of first use
    request: Mapping[str, Any]  # GenerateRequest as proto JSON: prompt as token ids; seed, max_tokens, method are set
    samples: tuple[ReceiptSample, ...]

    def to_line(self) -> bytes:
        """Returns the receipt's line, with its line feed."""
        shown = {"receipt": FORMAT, **_shallow(self)}
        return json.dumps(shown, default=_shallow, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Receipt:
        """Parses a receipt. Raises: ValueError, which says what is wrong."""
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
    """Converts a JSON value to `kind`, a dataclass of this module or the type of a field. Raises: ValueError."""
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
    """Returns the name of a router's file of receipts. The names of one router sort by time."""
    return f"receipts-{incarnation.hex()}-{number:06}.jsonl"


def read_receipts(path: Path, request_id: str | None = None) -> Iterator[Receipt]:
    """Yields the receipts that a file has now: all, or those of one request. Raises: ConfigError.

    A last line without a line feed is ignored unless it is a whole receipt.
    """
    wanted = b"" if request_id is None else json.dumps(request_id).encode()  # encoded as in a receipt's line
    for number, line in _lines(path):
        if wanted not in line:
            continue
        try:
            receipt = Receipt.from_line(line)
        except ValueError as error:
            if line.endswith(b"\n"):
                raise ConfigError(f"{path}, line {number}: not a receipt: {error}") from error
            continue
        if request_id in (None, receipt.request_id):
            yield receipt


def find_receipt(folder: Path, request_id: str) -> Receipt | None:
    """Returns the newest receipt with a request id. Raises: ConfigError."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a directory with receipts")
    paths = (path for path in folder.glob(PATTERN) if path.is_file())  # opening a pipe would wait for its writer
    found = (receipt for path in paths for receipt in read_receipts(path, request_id))
    return max(found, key=lambda receipt: receipt.ended_at, default=None)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yields (number, line) of lines that are not blank, with line feeds. Only one line is in memory at a time.

    Raises: ConfigError.
    """
    try:
        with path.open("rb") as file:
            left = os.fstat(file.fileno()).st_size  # excludes receipts that a router appends during replays
            for number in itertools.count(1):
                line = file.readline(min(left, MAX_LINE_BYTES + 1))
                left -= len(line)
                if len(line) > MAX_LINE_BYTES:
                    raise ConfigError(f"{path}, line {number}: not a receipt: it has more than {MAX_LINE_BYTES} bytes")
                if not line:
                    return
                if line.strip():
                    yield number, line
    except FileNotFoundError:
        return  # a running router has removed its oldest file
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
