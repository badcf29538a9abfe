"""What each token id adds to a text, as bytes, by a tokenizer's decoder. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from outrider.errors import NotSupportedError

_IN_WORD_PIECES = (
    *((" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m")),
    *((" do not", " don't"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re")),
)
"""What a WordPiece decoder with `cleanup` replaces in each token, in this order."""
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
"""A token of ByteFallback."""


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """Of one tokenizer. A token's bytes are those that it adds behind others: some decoders drop a leading space."""

    of_id: list[bytes]  # by id; empty where there is no token
    special_ids: frozenset[int]
    is_byte_level: bool  # any tokens decode to their bytes joined, at the beginning of a text too

    @classmethod
    def of(cls, tokenizer: Mapping[str, Any]) -> TokenBytes:
        """`tokenizer`: a tokenizer.json. Raises: NotSupportedError naming a decoder whose bytes are not known."""
        vocabulary = vocabulary_of(tokenizer)
        decoders = list(_flattened(tokenizer.get("decoder")))
        kinds = [str(decoder.get("type")) for decoder in decoders]
        is_byte_level = kinds == ["ByteLevel"]
        to_bytes = _byte_level if is_byte_level else _by_steps(decoders)
        of_id = [b""] * (max(vocabulary, default=-1) + 1)
        for token_id, token in vocabulary.items():
            of_id[token_id] = to_bytes(token)
        added = tokenizer.get("added_tokens") or ()
        return cls(of_id, frozenset(int(token["id"]) for token in added if token.get("special")), is_byte_level)


def vocabulary_of(tokenizer: Mapping[str, Any]) -> dict[int, str]:
    """Every id that has an entry in a tokenizer.json, added tokens included. Raises what anything else makes of it."""
    entries = tokenizer["model"]["vocab"]
    if isinstance(entries, Mapping):
        found = {int(token_id): str(token) for token, token_id in entries.items()}
    else:  # unigram: [[token, score], …], the id is the index
        found = {token_id: str(entry[0]) for token_id, entry in enumerate(entries)}
    return found | {int(token["id"]): str(token["content"]) for token in tokenizer.get("added_tokens") or ()}


def _flattened(decoder: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    if decoder is None:
        return
    if decoder.get("type") == "Sequence":
        for part in decoder["decoders"]:
            yield from _flattened(part)
    else:
        yield decoder


def _byte_level(token: str) -> bytes:
    try:
        return token.translate(_BYTES).encode("latin-1")
    except UnicodeEncodeError:  # an added token, in plain text
        return token.encode()


def _by_steps(decoders: list[Mapping[str, Any]]) -> Callable[[str], bytes]:
    """Raises: NotSupportedError."""
    kinds = [str(decoder.get("type")) for decoder in decoders]
    if not kinds or any(kind not in _STEPS for kind in kinds):
        raise NotSupportedError(f"the bytes of this tokenizer's tokens are not known (decoder: {kinds or 'none'})")
    num_steps = kinds.index("Fuse") if "Fuse" in kinds else len(kinds)  # the others work on the joined text
    steps = [_STEPS[kind](decoder) for kind, decoder in zip(kinds[:num_steps], decoders, strict=False)]
    has_bytes = "ByteFallback" in kinds

    def to_bytes(token: str) -> bytes:
        if has_bytes and (found := _BYTE.fullmatch(token)) is not None:
            return bytes.fromhex(found[1])
        for step in steps:
            token = step(token)
        return token.encode()

    return to_bytes


def _replace(decoder: Mapping[str, Any]) -> Callable[[str], str]:
    pattern, content = decoder["pattern"].get("String"), decoder["content"]
    if pattern is None:
        raise NotSupportedError("the bytes of this tokenizer's tokens are not known (decoder: Replace by a pattern)")
    return lambda token: token.replace(pattern, content)


def _metaspace(decoder: Mapping[str, Any]) -> Callable[[str], str]:
    replacement = decoder["replacement"]
    return lambda token: token.replace(replacement, " ")


def _word_piece(decoder: Mapping[str, Any]) -> Callable[[str], str]:
    prefix, has_cleanup = decoder["prefix"], decoder["cleanup"]

    def decode(token: str) -> str:
        token = token[len(prefix) :] if token.startswith(prefix) else f" {token}"
        for found, instead in _IN_WORD_PIECES if has_cleanup else ():
            token = token.replace(found, instead)
        return token

    return decode


def _strip(decoder: Mapping[str, Any]) -> Callable[[str], str]:
    content, start, stop = decoder["content"], decoder["start"], decoder["stop"]

    def decode(token: str) -> str:
        first = min(start, len(token) - len(token.lstrip(content)))
        return token[first : len(token) - min(stop, len(token[first:]) - len(token[first:].rstrip(content)))]

    return decode


def _unchanged(_decoder: Mapping[str, Any]) -> Callable[[str], str]:
    return lambda token: token


_STEPS: Mapping[str, Callable[[Mapping[str, Any]], Callable[[str], str]]] = {
    "Replace": _replace,
    "Metaspace": _metaspace,
    "WordPiece": _word_piece,
    "Strip": _strip,
    **dict.fromkeys(("ByteFallback", "Fuse"), _unchanged),
}


def _byte_table() -> dict[int, int]:
    """By character: the byte for which it stands in GPT-2's alphabet, or beyond all bytes where it stands for none."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return dict.fromkeys(hidden, 256) | {256 + index: byte for index, byte in enumerate(hidden)}


_BYTES = _byte_table()
