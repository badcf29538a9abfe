"""The queue of commands to the engine thread: this node's own commands come first, then routers take turns."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from decode_node.commands import Command, RouterCommand, SessionEnded
from outrider.session import CancelSequenceGroup, OpenSequenceGroup

MAX_COMMANDS = 128
"""Maximum number of queued commands of one router. The engine thread handles that many in a few iterations."""

MAX_TOKENS = 1 << 20
"""Number of tokens in one router's queue at which no further command is read. The last command may be of any length."""

MAX_WORK = 4096
"""Maximum cost, in prompt tokens, of the routers' commands handled between two steps. They take a few milliseconds."""

COMMAND_WORK = 128
"""The cost of a command in prompt tokens, in addition to the tokens that it carries."""


@dataclass(slots=True)
class _RouterQueue:
    """The queued commands of one router, in order."""

    commands: deque[RouterCommand] = field(default_factory=deque)
    num_tokens: int = 0
    cancelled: set[bytes] = field(default_factory=set)  # groups whose cancels are queued

    def put(self, command: RouterCommand) -> None:
        self.commands.append(command)
        self.num_tokens += _num_tokens(command)
        if _cancels_group(command):
            self.cancelled.add(command.message.sequence_group_id)

    def take(self) -> RouterCommand:
        """Pops the next command. Drops an open whose cancel is also queued; the cancel then finds no group."""
        while True:
            command = self.commands.popleft()
            self.num_tokens -= _num_tokens(command)
            match command.message:
                case OpenSequenceGroup(sequence_group_id=group_id) if group_id in self.cancelled:
                    continue
                case CancelSequenceGroup(sequence_group_id=group_id):
                    self.cancelled.discard(group_id)
            return command


class Inbox:
    """A queue of commands that any thread fills and the engine thread empties.

    Routers take turns, command by command, so a router that floods delays only itself. A session reads its next
    command from the stream only if `has_room`; until then the stream's flow control holds the router back. This
    node's own commands (transfers, ends of sessions, drains) come first and are not bounded.
    """

    def __init__(self, *, max_commands: int = MAX_COMMANDS, max_tokens: int = MAX_TOKENS) -> None:
        self._max_commands = max_commands
        self._max_tokens = max_tokens
        self._changed = threading.Condition()
        self._own: deque[Command] = deque()
        self._queues: dict[int, _RouterQueue] = {}  # by session id; the first has the next turn; empty ones are removed
        self._awaited: dict[tuple[int, bytes], list[RouterCommand]] = {}  # see `put_when_compiled`

    @property
    def is_empty(self) -> bool:
        return not (self._own or self._queues)

    def has_room(self, session_id: int) -> bool:
        """Returns whether the router may queue another command."""
        with self._changed:
            queued = self._queues.get(session_id) or _RouterQueue()
            of_router = [commands for (session, _), commands in self._awaited.items() if session == session_id]
            awaited = [*chain.from_iterable(of_router)]
            num_tokens = queued.num_tokens + sum(map(_num_tokens, awaited))
            return len(queued.commands) + len(awaited) < self._max_commands and num_tokens < self._max_tokens

    def put(self, command: Command) -> None:
        with self._changed:
            if isinstance(command, SessionEnded):  # all its groups are freed, so the session's commands are dropped
                self._queues.pop(command.session_id, None)
                self._awaited = {key: held for key, held in self._awaited.items() if key[0] != command.session_id}
            if not isinstance(command, RouterCommand):
                self._own.append(command)
            elif (key := _group_of(command)) not in self._awaited:
                self._queues.setdefault(command.session_id, _RouterQueue()).put(command)
            elif _cancels_group(command):
                del self._awaited[key]
            else:
                self._awaited[key].append(command)
            self._changed.notify()

    def put_when_compiled(self, opened: RouterCommand, compiled: Future[Any]) -> None:
        """Queues an open once its constraint is compiled, unless its group is cancelled before that.

        Later commands of the same group wait behind the open; commands of other groups do not.
        """
        key, commands = _group_of(opened), list[RouterCommand]([opened])
        with self._changed:
            if key in self._awaited:
                self._awaited[key].append(opened)
                return
            self._awaited[key] = commands
        compiled.add_done_callback(lambda _: self._put_awaited(key, commands))

    def _put_awaited(self, key: tuple[int, bytes], commands: list[RouterCommand]) -> None:
        with self._changed:
            if self._awaited.get(key) is commands:  # otherwise the group was cancelled, and perhaps opened again
                del self._awaited[key]
                first, *others = commands
                self.put(first)
                for command in others:  # under the lock, so a cancel from another thread comes after these
                    if command.compiled is not None:
                        self.put_when_compiled(command, command.compiled)
                    else:
                        self.put(command)
            commands.clear()  # the future keeps its callbacks, which would otherwise keep these commands alive

    def wait(self, timeout_seconds: float) -> None:
        """Waits until there is a command or the timeout is over."""
        with self._changed:
            if self.is_empty:
                self._changed.wait(timeout_seconds)

    def take_batch(self) -> list[Command]:
        """Returns the commands for one iteration: all of this node's own, and the routers' up to MAX_WORK."""
        with self._changed:
            commands = list(self._own)
            self._own.clear()
            work = 0
            while self._queues and work < MAX_WORK:
                command = self._next_of_routers()
                work += COMMAND_WORK + _num_tokens(command)
                commands.append(command)
            return commands

    def _next_of_routers(self) -> RouterCommand:
        session_id = next(iter(self._queues))
        queued = self._queues.pop(session_id)
        command = queued.take()
        if queued.commands:
            self._queues[session_id] = queued  # its next turn comes after the others'
        return command


def _group_of(command: RouterCommand) -> tuple[int, bytes]:
    return command.session_id, command.message.sequence_group_id


def _cancels_group(command: RouterCommand) -> bool:
    """Returns whether the command cancels a whole group."""
    return isinstance(command.message, CancelSequenceGroup) and not command.message.samples


def _num_tokens(command: RouterCommand) -> int:
    group = command.message
    if not isinstance(group, OpenSequenceGroup):
        return 0
    return len(group.prompt_token_ids) + sum(len(start.generated_token_ids) for start in group.samples)
