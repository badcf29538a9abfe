"""Stop strings, found across token borders."""

from __future__ import annotations

from collections.abc import Sequence


class StopStringMatcher:
    """Watches one sample's text; releases what can no longer begin a stop string.

    Of several strings that one piece of text completes, the one that begins earliest wins,
    then the first in the list. After a match nothing more is released.
    """

    def __init__(self, strings: Sequence[str] = (), *, include_match: bool = False) -> None:
        assert all(strings), "an empty stop string would match everywhere"
        self.strings = tuple(strings)  # without any, it releases everything at once
        self._include_match = include_match
        self._held = ""  # not released: an end that could begin a stop string
        self._num_seen = 0  # characters before the end of `_held`
        self._floor = 0  # no match begins before this character
        self.matched: str | None = None

    def append(self, text: str) -> str:
        """Takes the text of one token; gives what may be sent. Sets `matched`."""
        assert self.matched is None, "nothing follows a match"
        self._num_seen += len(text)
        text = self._held + text
        start = min(max(self._floor - (self._num_seen - len(text)), 0), len(text))
        begin, matched = self._find(text, start)
        if matched is not None:
            self.matched, self._held = matched, ""
            return text[: begin + len(matched)] if self._include_match else text[:begin]
        cut = self._hold_from(text, start)
        self._held = text[cut:]
        return text[:cut]

    def forbid_before_here(self, *, num_characters_ahead: int = 0) -> None:
        """No match may begin in the text seen so far, nor in the next `num_characters_ahead`."""
        self._floor = self._num_seen + num_characters_ahead

    def finish(self) -> str:
        """What was held back: the text ends here without a match."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str, start: int) -> tuple[int, str | None]:
        """(where it begins, the string) of the match that wins."""
        found_at, found = len(text), None
        for string in self.strings:
            at = text.find(string, start)
            if 0 <= at < found_at:
                found_at, found = at, string
        return found_at, found

    def _hold_from(self, text: str, start: int) -> int:
        """Where the longest end that is a proper beginning of a stop string starts."""
        cut = len(text)
        for string in self.strings:
            at = text.find(string[0], max(start, len(text) - len(string) + 1), cut)
            while at >= 0:
                if string.startswith(text[at:]):
                    cut = at
                    break
                at = text.find(string[0], at + 1, cut)
        return cut
