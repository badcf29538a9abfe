"""A receipt: what an answer was computed from, what came of it, and which nodes computed it (docs/replay.md).

One line of JSON, so that `jq` reads it. It holds prompt and answer as token ids: with the model's tokenizer, texts of
users.
"""

from __future__ import annotations

import json
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from outrider.node_stamp import NodeStamp

FORMAT = 1
"""`receipt` of each line. Fields may be added to a format; readers pass over those that they do not know."""
MAX_LINE_BYTES = 64 << 20
"""Of a receipt: seven million tokens."""
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
