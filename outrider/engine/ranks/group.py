"""Rank 0's view of the other ranks. It sends them commands and reports a lost rank, which ends the node."""

from __future__ import annotations

import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

from outrider.engine.ranks.channel import Channel, RankLostError
from outrider.engine.ranks.commands import Command, CommandMark, KvRefused, KvRequest, RankTask, Stop
from outrider.errors import InternalError

STOP_SECONDS = 5.0
LOSS_WAIT_SECONDS = 5.0
"""Seconds that rank 0 waits, after a failed collective, for the end of the process that caused the failure."""
_POLL_SECONDS = 0.02


@dataclass(slots=True)
class Member:
    """A rank other than 0."""

    rank: int
    process: subprocess.Popen[bytes]
    commands: Channel
    kv: Channel
    tasks: socket.socket  # for the descriptors of channels to tasks
    kv_lock: threading.Lock = field(default_factory=threading.Lock)

    def loss(self) -> RankLostError | None:
        """Returns an error if the process has ended, or None while it runs."""
        status = self.process.poll()
        if status is None:
            return None
        return RankLostError(f"rank {self.rank} (process {self.process.pid}) ended with status {status}")


class RankGroup:
    """The other ranks of a node. Within the group's context, threads watch them; outside it, a lost rank is noticed
    only when a command or request is sent to it.

    `running` and `layer_done` belong to the engine thread; any thread may call `ask` and `start` and read `reached`.
    """

    def __init__(
        self, *, answer_seconds: float, on_lost: Callable[[RankLostError], None], release: Callable[[], object]
    ) -> None:
        """`on_lost` is called at most once for each rank that ends before `close`, from a separate thread.

        `answer_seconds`: timeout of a KV request. `release`: called by `close` to free other resources.
        """
        self._answer_seconds = answer_seconds
        self.members: list[Member] = []
        self._on_lost = on_lost
        self._release = release
        self._is_closing = False
        self._num_sent = 0
        self.reached = CommandMark(0)
        """This rank's progress. A request to another rank waits until that rank has made the same progress."""

    @property
    def size(self) -> int:
        """Number of ranks, including rank 0."""
        return len(self.members) + 1

    def add(self, member: Member) -> None:
        """Adds a member, whose process `close` will end. Call it before the first command or request."""
        self.members.append(member)

    # ---- commands

    @contextmanager
    def running(self, *commands: Command) -> Iterator[None]:
        """Sends a command to the other ranks; the body of the context does this rank's part.

        `commands`: one for all other ranks, or one for each.

        Raises: RankLostError if the body fails because a rank is gone.
        """
        self._send(commands)
        try:
            yield
        except Exception as error:
            self.raise_if_lost(error)
            raise
        self.reached = CommandMark(self._num_sent)

    def layer_done(self, layer: int) -> None:
        """Records, within `running`, that this rank has finished the layer."""
        self.reached = CommandMark(self._num_sent - 1, layer + 1)

    def _send(self, commands: Sequence[Command]) -> None:
        encoded = [Channel.encode(command) for command in commands]
        for member in self.members:
            try:
                member.commands.send_encoded(encoded[(member.rank - 1) % len(encoded)])
            except RankLostError as error:
                self.raise_if_lost(error)
                raise
        self._num_sent += 1

    # ---- KV

    def ask(self, rank: int, request: KvRequest) -> Any:
        """Returns the answer of a rank other than 0.

        Raises: InternalError if the rank refuses; RankLostError, after killing it, if it does not answer.
        """
        member = self.members[rank - 1]
        with member.kv_lock:
            try:
                member.kv.send(request)
                answer = member.kv.receive(begins_within_seconds=self._answer_seconds)
            except RankLostError:
                member.process.kill()  # otherwise steps would continue without KV transfers
                raise
        if isinstance(answer, KvRefused):
            raise InternalError(f"rank {rank}: {answer.message}")
        return answer

    # ---- tasks

    def start(self, rank: int, task: RankTask) -> Channel:
        """Starts a task in a rank other than 0. Returns the channel to it. Raises: RankLostError."""
        ours, theirs = socket.socketpair()
        channel = Channel(ours, peer=f"rank {rank}", timeout_seconds=self._answer_seconds)
        try:
            with theirs:
                socket.send_fds(self.members[rank - 1].tasks, [b"\0"], [theirs.fileno()])
            channel.send(task)
        except OSError as error:
            channel.close()
            raise RankLostError(f"rank {rank} starts no task: {error}") from error
        return channel

    def take_answer(self, rank: int, channel: Channel) -> Any:
        """Receives a task's last message, and closes the channel.

        Raises: RankLostError, after killing the rank, if nothing arrives, because the task may still read KV.
        """
        try:
            return channel.receive(begins_within_seconds=self._answer_seconds)
        except RankLostError:
            self.members[rank - 1].process.kill()
            raise
        finally:
            channel.close()

    # ---- life

    def raise_if_lost(self, cause: Exception) -> None:
        """Raises RankLostError, caused by `cause`, if a rank has ended or ends within LOSS_WAIT_SECONDS."""
        deadline = time.monotonic() + LOSS_WAIT_SECONDS
        while True:
            for member in self.members:
                if (loss := member.loss()) is not None:
                    raise loss from cause
            if time.monotonic() > deadline:
                return
            time.sleep(_POLL_SECONDS)

    def __enter__(self) -> Self:
        for member in self.members:
            threading.Thread(target=self._watch, args=(member,), name=f"rank-{member.rank}", daemon=True).start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _watch(self, member: Member) -> None:
        member.process.wait()
        loss = member.loss()
        if loss is not None and not self._is_closing:
            self._on_lost(loss)

    def close(self) -> None:
        """Ends the other ranks with a command, or with SIGKILL if they do not obey in time. Idempotent."""
        if self._is_closing:
            return
        self._is_closing = True
        for member in self.members:
            try:
                member.commands.send(Stop())
            except RankLostError:
                continue  # the process has ended or will be killed
        deadline = time.monotonic() + STOP_SECONDS
        for member in self.members:
            try:
                member.process.wait(max(deadline - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                member.process.kill()
                member.process.wait()
            member.commands.close()
            member.kv.close()
            member.tasks.close()
        self._release()
