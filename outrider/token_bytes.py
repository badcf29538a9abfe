"""The bytes that each token id adds to a text, derived from a tokenizer's decoder. Torch-free."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer, decoders

from outrider.errors import NotSupportedError
from outrider.heap import collection_paused

_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
"""Matches a ByteFallback token, which by itself may be only part of a character."""


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """The bytes that each token of one tokenizer adds to a text when it follows other tokens."""

    of_id: list[bytes]  # by token id; empty for an id without a token
    special_ids: frozenset[int]
    is_byte_level: bool  # whether a token sequence, even at the start of a text, decodes to its tokens' joined bytes

    @classmethod
    @collection_paused()
    def of(cls, tokenizer: Tokenizer) -> TokenBytes:
        """Reads the bytes from a tokenizer, in about 0.1 s.

        Raises: NotSupportedError, which names the tokenizer's decoder, if the bytes cannot be derived from it.
        """
        parts = [] if tokenizer.decoder is None else list(_parts(json.loads(tokenizer.decoder.__getstate__())))
        is_byte_level = [part["type"] for part in parts] == ["ByteLevel"]
        to_bytes = _byte_level if is_byte_level else _by_steps(parts)
        added = tokenizer.get_added_tokens_decoder()
        tokens = {token_id: token for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items()}
        tokens |= {token_id: token.content for token_id, token in added.items()}
        of_id = [b""] * (max(tokens, default=-1) + 1)
        for token_id, token in tokens.items():
            of_id[token_id] = to_bytes(token)
        special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        return cls(of_id, special_ids, is_byte_level)


def _parts(decoder: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if decoder["type"] == "Sequence":
        for part in decoder["decoders"]:
            yield from _parts(part)
    else:
        yield decoder


def _byte_level(token: str) -> bytes:
    try:
        return token.translate(_BYTES).encode("latin-1")
    except UnicodeEncodeError:  # an added token, which is plain text
        return token.encode()


def _by_steps(parts: list[dict[str, Any]]) -> Callable[[str], bytes]:
    """Returns a function that applies to one token those of a decoder's `parts` that come before Fuse.

    Later parts apply to joined text. Raises: NotSupportedError if a part is unknown or there are no parts.
    """
    kinds = [part["type"] for part in parts]
    num_steps = kinds.index("Fuse") if "Fuse" in kinds else len(kinds)
    found = [_step(part) for part in parts[:num_steps] if part["type"] != "ByteFallback"]
    steps = [step for step in found if step is not None]
    if not parts or None in found:
        names = ", ".join(kinds) or "none"
        raise NotSupportedError(f"the bytes of this tokenizer's tokens are not known (decoder: {names})")
    has_bytes = "ByteFallback" in kinds

    def to_bytes(token: str) -> bytes:
        if has_bytes and token.startswith("<0x") and (byte := _BYTE.fullmatch(token)) is not None:
            return bytes.fromhex(byte[1])
        for step in steps:
            token = step(token)
        return token.encode()

    return to_bytes


def _step(part: dict[str, Any]) -> Callable[[str], str] | None:
    """Returns the function that a decoder's part applies to every token but the first; None if the part is unknown."""
    match part:
        case {"type": "Replace", "pattern": {"String": old}, "content": new}:
            return lambda token: token.replace(old, new)
        case {"type": "Metaspace", "replacement": old}:
            return lambda token: token.replace(old, " ")
        case {"type": "WordPiece", "prefix": prefix, "cleanup": cleanup}:
            word_piece = decoders.WordPiece(prefix, cleanup)
            return lambda token: word_piece.decode(["a", token]).removeprefix("a")
    return None


def _byte_table() -> dict[int, int]:
    """Returns a table that translates GPT-2's alphabet to bytes. A character that stands for no byte becomes 256."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return dict.fromkeys(hidden, 256) | {256 + index: byte for index, byte in enumerate(hidden)}


_BYTES = _byte_table()
