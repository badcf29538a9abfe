"""Token ids to text, one token at a time, whatever way the tokens arrive."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

REPLACEMENT = "�"
CONTEXT_TOKENS = 6
"""Prompt tokens that the window method looks back to: enough for any tokenizer's joining of words."""
MAX_HELD_TOKENS = 16
"""Tokens without a complete character are held back up to this many; more are broken or have no text."""


class Detokenizer(Protocol):
    """One sample's decoder. Appending token by token gives what decoding all at once gives."""

    is_mid_character: bool
    """Bytes of an incomplete character are held back."""

    def append(self, token_id: int) -> str:
        """The text that is complete with this token."""

    def finish(self) -> str:
        """What is held back, broken bytes as U+FFFD."""


class ByteDetokenizer:
    """For byte-level tokenizers: each token is its bytes, so one token costs one table look-up.

    `token_bytes[id]` is what the token adds; ids beyond the table add nothing: without a table there is no text.
    """

    __slots__ = ("_decoder", "_token_bytes", "is_mid_character")

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.is_mid_character = False

    def append(self, token_id: int) -> str:
        if token_id >= len(self._token_bytes):
            return ""
        added = self._token_bytes[token_id]
        if not self.is_mid_character and added.isascii():  # nearly every token: the decoder is Python
            return added.decode("ascii")
        text = self._decoder.decode(added)
        self.is_mid_character = bool(self._decoder.getstate()[0])
        return text

    def finish(self) -> str:
        return self._decoder.decode(b"", True)


class WindowDetokenizer:
    """For every other tokenizer: decodes a short window and takes what it adds.

    The window is the tokens whose text was emitted last, then those that are held back;
    both decodings start at the same token, so what a decoder does at the start (such as
    dropping a leading space) cancels out. (The method of text-generation-inference and vLLM.)
    `context` are the tokens before the answer.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._token_ids = list(context[-CONTEXT_TOKENS:])
        self._num_emitted = len(self._token_ids)  # of the window
        self._emitted_text = decode(self._token_ids)
        self.is_mid_character = False

    def append(self, token_id: int) -> str:
        self._token_ids.append(token_id)
        text = self._decode(self._token_ids)
        has_text = len(text) > len(self._emitted_text)
        self.is_mid_character = has_text and text.endswith(REPLACEMENT)
        if (has_text and not self.is_mid_character) or self._num_held >= MAX_HELD_TOKENS:
            return self._emit(text)
        return ""

    def finish(self) -> str:
        return self._emit(self._decode(self._token_ids)) if self._num_held else ""

    @property
    def _num_held(self) -> int:
        return len(self._token_ids) - self._num_emitted

    def _emit(self, text: str) -> str:
        added = text[len(self._emitted_text) :]
        self._token_ids = self._token_ids[self._num_emitted :]
        self._num_emitted = len(self._token_ids)
        self._emitted_text = self._decode(self._token_ids)
        self.is_mid_character = False
        return added
