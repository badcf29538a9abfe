"""A long answer that a thread reads; its outcome shows the effect of a fault in the middle of it."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence

from outrider.client import Client
from outrider.errors import OutriderError

TOLD_SECONDS = 40.0
"""Seconds within which a request must end, in whatever way, after its node died or froze."""
WHOLE_SECONDS = 300.0
"""Seconds for a whole long answer on a busy machine."""
PROMPT = (  # longer than prompts that a decode node computes itself
    "Once upon a time, in a village by the sea, there lived an old fisherman who had seen every storm of the last"
    " sixty years, and who told the children of the village about each of them when the nets were mended and dry"
)


def unseen(prompt: str = PROMPT) -> str:
    """Returns a prompt that no node has in its cache."""
    return f"{secrets.token_hex(8)} {prompt}"


class Story(threading.Thread):
    """A running answer. Its first token sets `begun`; `outcome` is the finish reason or the error."""

    def __init__(self, target: str | Sequence[str], prompt: str | None = None, *, max_tokens: int = 4000) -> None:
        super().__init__(daemon=True)
        self._target = target
        self._prompt = unseen() if prompt is None else prompt
        self._max_tokens = max_tokens
        self.begun = threading.Event()
        self.token_ids: list[int] = []
        self.outcome: str | OutriderError | None = None
        self.start()

    def run(self) -> None:
        try:
            with Client(self._target) as client:
                options = {"max_tokens": self._max_tokens, "temperature": 0, "ignore_eos": True}
                with client.generate(self._prompt, timeout_seconds=WHOLE_SECONDS, **options) as stream:
                    for delta in stream:
                        self.token_ids.extend(delta.token_ids)
                        self.begun.set()
                    self.outcome = stream.finished[0].reason.value
        except OutriderError as error:
            self.outcome = error
        self.begun.set()

    def wait(self, *, timeout_seconds: float = TOLD_SECONDS) -> str | OutriderError | None:
        self.join(timeout_seconds)
        assert not self.is_alive(), f"the request hangs for {timeout_seconds:g} s"
        return self.outcome


def begun_story(target: str | Sequence[str], prompt: str | None = None, *, max_tokens: int = 4000) -> Story:
    story = Story(target, prompt, max_tokens=max_tokens)
    assert story.begun.wait(60)
    assert story.outcome is None, story.outcome
    return story
