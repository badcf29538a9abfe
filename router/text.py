"""One sample's text: detokenizer and stop strings together."""

from __future__ import annotations

from router.detokenizer import Detokenizer
from router.stop_strings import StopStringMatcher


class AnswerText:
    """Turns one sample's tokens into the text that may be sent.

    Held back are the bytes of an incomplete character and an end that could begin a stop
    string. A stop string may not begin in the text of the first `min_tokens` tokens; a
    character that they begin belongs to them.
    """

    def __init__(self, detokenizer: Detokenizer, matcher: StopStringMatcher, *, min_tokens: int = 0) -> None:
        self._detokenizer = detokenizer
        self._matcher = matcher
        self._has_stop_strings = bool(matcher.strings)
        self._num_unstoppable = min_tokens  # tokens still to come in whose text no stop string begins
        self.matched_stop_string: str | None = None

    def append(self, token_id: int) -> str:
        """The text that this token releases. Nothing may follow a match."""
        text = self._detokenizer.append(token_id)
        if not self._has_stop_strings:
            return text
        if self._num_unstoppable == 0:
            released = self._matcher.append(text)
            self.matched_stop_string = self._matcher.matched
            return released
        self._num_unstoppable -= 1
        # Nothing was held back so far, so forbidding up to the end of this text releases all of it.
        num_begun = 1 if self._detokenizer.is_mid_character else 0
        self._matcher.forbid_before_here(num_characters_ahead=len(text) + num_begun)
        return self._matcher.append(text)

    def finish(self) -> str:
        """What is held back, when the sample ends without a stop string. Broken bytes are U+FFFD."""
        if self.matched_stop_string is not None:
            return ""
        return self._matcher.finish() + self._detokenizer.finish()
