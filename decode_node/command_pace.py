"""How fast one router's commands are read: what it floods with waits on its own side."""

from __future__ import annotations

import time
from collections.abc import Callable

from outrider.session import OpenSequenceGroup, SequenceGroupCommand

COMMANDS_PER_SECOND = 500.0
"""Of one session, for long. Each takes the engine's thread up to a third of a millisecond from its steps."""
MAX_BURST = 1000.0
"""Commands that may come at once: a router that connects opens what it has."""
TOKENS_OF_A_COMMAND = 1024
"""A prompt counts as one command more for so many tokens: they are parsed beside the engine's thread."""


class CommandPace:
    """A token bucket. Nothing is refused: the reader waits, and the stream's flow control holds the router back."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left = MAX_BURST
        self._at = clock()

    def charge(self, command: SequenceGroupCommand) -> float:
        """Counts a command that was read; how many seconds to wait before the next."""
        now = self._clock()
        self._left = min(self._left + (now - self._at) * COMMANDS_PER_SECOND, MAX_BURST) - _cost(command)
        self._at = now
        return max(-self._left, 0.0) / COMMANDS_PER_SECOND


def _cost(command: SequenceGroupCommand) -> float:
    if not isinstance(command, OpenSequenceGroup):
        return 1.0
    num_tokens = len(command.prompt_token_ids) + sum(len(start.generated_token_ids) for start in command.samples)
    return 1.0 + num_tokens / TOKENS_OF_A_COMMAND
