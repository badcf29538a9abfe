"""One sample's text: its tokens' characters, and stop strings found across their borders."""

from __future__ import annotations

from collections.abc import Sequence

from router.detokenizer import Detokenizer


class AnswerText:
    """Turns one sample's tokens into the text that may be sent.

    Held back are the bytes of an incomplete character and an end that could begin a stop
    string. A stop string may not begin in the text of the first `min_tokens` tokens; a
    character that they begin belongs to them.

    Of several strings that one token's text completes, the one that begins earliest wins,
    then the first in the list. After a match nothing more is released.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop_strings: Sequence[str] = (),
        *,
        include_match: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """`include_match`: the text ends with the stop string, not before it."""
        assert all(stop_strings), "an empty stop string would match everywhere"
        self._detokenizer = detokenizer
        self._stop_strings = stop_strings
        self._include_match = include_match
        self._num_unstoppable = min_tokens  # tokens still to come in whose text no stop string begins
        self._num_skipped = 0  # characters still to come in which none begins
        self._held = ""  # not released: an end that could begin a stop string
        self.matched_stop_string: str | None = None

    def append(self, token_id: int) -> str:
        """The text that this token releases. Nothing may follow a match."""
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
        """What is held back, when the sample ends without a stop string. Broken bytes are U+FFFD."""
        if self.matched_stop_string is not None:
            return ""
        held, self._held = self._held, ""
        return held + self._detokenizer.finish()

    def _find(self, text: str, start: int) -> tuple[int, str | None]:
        """(where it begins, the string) of the match that wins."""
        found_at, found = len(text), None
        for string in self._stop_strings:
            at = text.find(string, start)
            if 0 <= at < found_at:
                found_at, found = at, string
        return found_at, found

    def _hold_from(self, text: str, start: int) -> int:
        """Where the longest end that is a proper beginning of a stop string starts."""
        cut = len(text)
        for string in self._stop_strings:
            at = text.find(string[0], max(start, len(text) - len(string) + 1), cut)
            while at >= 0:
                if string.startswith(text[at:]):
                    cut = at
                    break
                at = text.find(string[0], at + 1, cut)
        return cut
