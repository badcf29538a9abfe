"""A rank other than 0: runs rank 0's commands and tasks, and serves reads and writes of its KV."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING

import torch

from outrider.engine.device import device_type
from outrider.engine.ranks.channel import Channel, RankLostError
from outrider.engine.ranks.commands import (
    Command,
    CommandMark,
    KvRefused,
    KvRequest,
    MoveSlots,
    RankTask,
    RenewCopies,
    Step,
    Stop,
)
from outrider.errors import InternalError

if TYPE_CHECKING:
    from outrider.engine.kv_cache.base import Bytes
    from outrider.engine.kv_cache.paged_cache import PagedKVCache
    from outrider.engine.runner_base import ModelRunner


class RankProgress:
    """A rank's progress through its commands. One thread advances it; others wait for it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._at = CommandMark(0)

    def layer_done(self, layer: int) -> None:
        """Records that a layer is finished. Layers finish in order, from 0."""
        with self._changed:
            self._at = CommandMark(self._at.num_commands, layer + 1)
            self._changed.notify_all()

    def command_done(self) -> None:
        with self._changed:
            self._at = CommandMark(self._at.num_commands + 1)
            self._changed.notify_all()

    def wait_for(self, mark: CommandMark, timeout_seconds: float) -> bool:
        """Waits for the mark. Returns whether it was reached in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._at >= mark, timeout_seconds)


class RankWorker:
    """A rank's work: steps in the caller's thread, KV requests in a second thread, and each task in one of its own."""

    def __init__(
        self,
        *,
        runner: ModelRunner,
        kv_cache: PagedKVCache,
        commands: Channel,
        kv: Channel,
        tasks: socket.socket,
        timeout_seconds: float,
    ) -> None:
        """`kv_cache`: this rank's own. `timeout_seconds`: how long a request may wait for commands."""
        self._runner = runner
        self._kv_cache = kv_cache
        self._commands = commands
        self._kv = kv
        self._tasks = tasks
        self._timeout_seconds = timeout_seconds
        self._progress = RankProgress()

    def run(self) -> None:
        """Runs until rank 0 sends Stop. Raises: RankLostError if rank 0 is gone, and any error of a step."""
        threading.Thread(target=self._serve_kv, name="rank-kv", daemon=True).start()
        threading.Thread(target=self._serve_tasks, name="rank-tasks", daemon=True).start()
        while True:
            command: Command = self._commands.receive(begins_within_seconds=None)
            match command:
                case Stop():
                    return
                case Step():
                    # The last collective gives every tensor-parallel rank the logits, but only rank 0 uses them.
                    for part in command.parts[:-1]:
                        self._runner.forward(part)
                    layer_done = self._progress.layer_done if command.reports_layers else None
                    self._runner.forward(command.parts[-1], on_layer_done=layer_done)
                case MoveSlots():
                    self._kv_cache.move_slots(command.pairs)
                case RenewCopies():
                    self._runner.renew_copies(command.layer)
            self._progress.command_done()

    def _serve_kv(self) -> None:
        self._use_device()
        try:
            while True:
                request: KvRequest = self._kv.receive(begins_within_seconds=None)
                self._kv.send(self._answer(request))
        except RankLostError:
            return  # rank 0 is gone; the thread of `run` notices it too

    def _use_device(self) -> None:
        if device_type(self._kv_cache.device) == "cuda":
            torch.cuda.set_device(self._kv_cache.device)  # by default, a new thread uses the first GPU

    def _answer(self, request: KvRequest) -> bytes | KvRefused | None:
        try:
            if request.payload is None:
                return self._read(request).tobytes()
            self._wait_for(request.after)
            self._kv_cache.write(request.plane, request.layers, request.slots, request.payload, heads=request.heads)
        except InternalError as error:
            return KvRefused(error.message)
        except Exception as error:  # noqa: BLE001 process boundary: rank 0 reports it
            return KvRefused(f"{type(error).__name__}: {error}")
        return None

    def _read(self, request: KvRequest) -> Bytes:
        """Returns what the request asks for. Raises: InternalError."""
        self._wait_for(request.after)
        # On a GPU, the read runs after all work queued so far, which includes the layers up to `request.after`.
        return self._kv_cache.read(request.plane, request.layers, request.slots, heads=request.heads)

    def _wait_for(self, mark: CommandMark) -> None:
        if not self._progress.wait_for(mark, self._timeout_seconds):
            raise InternalError(f"the rank did not reach {mark} within {self._timeout_seconds:g} s")

    def _serve_tasks(self) -> None:
        while True:
            data, descriptors, _, _ = socket.recv_fds(self._tasks, 1, 1)
            if not data:
                return  # rank 0 is gone
            if not descriptors:
                continue  # this process has too many; rank 0 sees that the channel is closed
            end = socket.socket(fileno=descriptors[0])
            end.set_inheritable(False)
            channel = Channel(end, peer="rank 0", timeout_seconds=self._timeout_seconds)
            threading.Thread(target=self._run_task, args=(channel,), name="rank-task", daemon=True).start()

    def _run_task(self, channel: Channel) -> None:
        self._use_device()
        try:
            task: RankTask = channel.receive(begins_within_seconds=self._timeout_seconds)
            task.run(self._read, channel)
        except RankLostError:
            return  # rank 0 is gone
        finally:
            channel.close()
