"""Commands on their way to the engine thread, so many for each router and no more."""

from __future__ import annotations

import queue
import threading
from collections import Counter

from decode_node.commands import Command, GroupOpened, RouterCommand
from outrider.errors import CapacityError

MAX_COMMANDS = 4096
"""Of one router, between two iterations of the engine thread: many times what a router's queue holds."""

MAX_TOKENS = 1 << 20
"""In the prompts of those; a single one may have more."""

TOO_MANY_TOKENS = "TOO_MANY_TOKENS"
"""Reason of the refusal of one prompt: 33 honest ones of 32k tokens reach it, and find room a moment later."""


class Inbox:
    """Any thread puts, the engine thread takes.

    An iteration may take long, and a router may open groups as fast as it can write: what waits
    here is bounded for each session, so that one that floods is refused, and no other.
    What this node says to itself (transfers, ends of sessions, drains) is never refused.
    """

    def __init__(self, *, max_commands: int = MAX_COMMANDS, max_tokens: int = MAX_TOKENS) -> None:
        self._max_commands = max_commands
        self._max_tokens = max_tokens
        self._queue: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_commands: Counter[int] = Counter()  # by session
        self._num_tokens: Counter[int] = Counter()  # by session

    @property
    def is_empty(self) -> bool:
        return self._queue.empty()

    def put(self, command: Command) -> None:
        """Raises: CapacityError when too much of this router waits already; `TOO_MANY_TOKENS`, or too many commands."""
        if isinstance(command, RouterCommand):
            self._count_in(command)
        self._queue.put(command)

    def get(self, timeout_seconds: float) -> Command:
        """Raises: queue.Empty when nothing comes."""
        return self._taken(self._queue.get(timeout=timeout_seconds))

    def take_all(self) -> list[Command]:
        """What is here now."""
        return [self._taken(self._queue.get_nowait()) for _ in range(self._queue.qsize())]

    def _count_in(self, command: RouterCommand) -> None:
        session_id, num_tokens = command.session_id, _num_tokens(command)
        with self._lock:
            num_waiting = self._num_commands[session_id]
            if num_waiting >= self._max_commands:
                raise CapacityError(
                    f"{num_waiting} commands of this router wait already; at most {self._max_commands} may",
                    reason="TOO_MANY_COMMANDS",
                )
            if num_waiting and self._num_tokens[session_id] + num_tokens > self._max_tokens:
                raise CapacityError(
                    f"{self._num_tokens[session_id]} prompt tokens of this router wait already; {num_tokens} more "
                    f"would exceed {self._max_tokens}",
                    reason=TOO_MANY_TOKENS,
                )
            self._num_commands[session_id] += 1
            self._num_tokens[session_id] += num_tokens

    def _taken(self, command: Command) -> Command:
        if isinstance(command, RouterCommand):
            with self._lock:
                self._num_commands[command.session_id] -= 1
                self._num_tokens[command.session_id] -= _num_tokens(command)
                if not self._num_commands[command.session_id]:
                    del self._num_commands[command.session_id], self._num_tokens[command.session_id]
        return command


def _num_tokens(command: RouterCommand) -> int:
    if not isinstance(command, GroupOpened):
        return 0
    group = command.group
    return len(group.prompt_token_ids) + sum(len(start.generated_token_ids) for start in group.samples)
