"""Turns token ids into an answer's text, one token at a time, and finds stop strings across token boundaries."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

REPLACEMENT = "�"
CONTEXT_TOKENS = 6
"""Number of prompt tokens at the start of the window, as context. It is enough for any tokenizer to join words."""
MAX_HELD_TOKENS = 16
"""Maximum tokens held back for an incomplete character. Longer runs of tokens have broken bytes or no text."""


class ByteDetokenizer:
    """A detokenizer for byte-level tokenizers, whose tokens are byte strings. Each token costs one table lookup.

    `token_bytes[id]` has the token's bytes; ids beyond the table have none.
    """

    __slots__ = ("_decoder", "_token_bytes", "is_mid_character")

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.is_mid_character = False  # whether bytes of an incomplete character are held back

    def append(self, token_id: int) -> str:
        """Returns the text that this token completes."""
        if token_id >= len(self._token_bytes):
            return ""
        added = self._token_bytes[token_id]
        if not self.is_mid_character and added.isascii():  # true for nearly every token, and the decoder is slow Python
            return added.decode("ascii")
        text = self._decoder.decode(added)
        self.is_mid_character = bool(self._decoder.getstate()[0])
        return text

    def finish(self) -> str:
        """Returns the text held back, with U+FFFD for broken bytes."""
        return self._decoder.decode(b"", True)


class WindowDetokenizer:
    """A detokenizer for all other tokenizers. It decodes a short window and returns the text that a token added.

    The window has the tokens whose text was emitted last, followed by those held back. It is
    decoded with and without the tokens held back. Both decodings start at the same token, so
    whatever a decoder does at the start, for example dropping a space, cancels out. (This is the method of
    text-generation-inference and vLLM.) `context`: the tokens before the answer.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._token_ids = list(context[-CONTEXT_TOKENS:])
        self._num_emitted = len(self._token_ids)  # tokens of the window whose text was emitted
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


Detokenizer = ByteDetokenizer | WindowDetokenizer
"""One sample's detokenizer. Appending token by token gives the same text as decoding all tokens at once."""


class AnswerText:
    """Turns one sample's tokens into the text that may be sent.

    It holds back the bytes of an incomplete character and any suffix that could begin a stop
    string. A stop string that begins within the text of the first `min_tokens` tokens is not matched. If the last of
    these tokens ends in the middle of a character, that whole character belongs to this text.

    If one token's text completes several stop strings, the one that begins earliest wins;
    if several begin there, the first in the list wins. After a match nothing more is released.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop_strings: Sequence[str] = (),
        *,
        include_match: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """`include_match`: whether the text includes the stop string that ends it."""
        assert all(stop_strings), "an empty stop string would match everywhere"
        self._detokenizer = detokenizer
        self._stop_strings = stop_strings
        self._include_match = include_match
        self._num_unstoppable = min_tokens  # tokens still to come in whose text no stop string may begin
        self._num_skipped = 0  # characters still to come in which no stop string may begin
        self._held = ""  # text held back: a suffix that could begin a stop string
        self.matched_stop_string: str | None = None

    def append(self, token_id: int) -> str:
        """Returns the text that this token releases. Must not be called after a match."""
        text = self._detokenizer.append(token_id)
        if not self._stop_strings:
            return text
        if self._num_unstoppable:
            self._num_unstoppable -= 1
            self._num_skipped = 1 if self._detokenizer.is_mid_character else 0
            return text
        assert self.matched_stop_string is None, "nothing follows a match"
        text = self._held + text
        start = min(self._num_skipped, len(text))
        self._num_skipped -= start
        begin, self.matched_stop_string = self._find(text, start)
        if self.matched_stop_string is not None:
            self._held = ""
            return text[: begin + len(self.matched_stop_string)] if self._include_match else text[:begin]
        cut = self._hold_from(text, start)
        self._held = text[cut:]
        return text[:cut]

    def finish(self) -> str:
        """Returns the text held back, with U+FFFD for broken bytes. After a match it returns an empty string."""
        if self.matched_stop_string is not None:
            return ""
        held, self._held = self._held, ""
        return held + self._detokenizer.finish()

    def _find(self, text: str, start: int) -> tuple[int, str | None]:
        """Returns (index, stop string) of the winning match."""
        found_at, found = len(text), None
        for string in self._stop_strings:
            at = text.find(string, start)
            if 0 <= at < found_at:
                found_at, found = at, string
        return found_at, found

    def _hold_from(self, text: str, start: int) -> int:
        """Returns the start of the text's longest suffix that is a proper prefix of a stop string."""
        cut = len(text)
        for string in self._stop_strings:
            at = text.find(string[0], max(start, len(text) - len(string) + 1), cut)
            while at >= 0:
                if string.startswith(text[at:]):
                    cut = at
                    break
                at = text.find(string[0], at + 1, cut)
        return cut
