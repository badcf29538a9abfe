"""A rank other than 0: runs rank 0's commands, and serves reads and writes of its KV."""

from __future__ import annotations

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
    RenewCopies,
    Step,
    Stop,
)
from outrider.errors import InternalError

if TYPE_CHECKING:
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
    """A rank's work: steps in the caller's thread, and KV requests in a second thread."""

    def __init__(
        self, *, runner: ModelRunner, kv_cache: PagedKVCache, commands: Channel, kv: Channel, timeout_seconds: float
    ) -> None:
        """`kv_cache`: this rank's own. `timeout_seconds`: how long a request may wait for commands."""
        self._runner = runner
        self._kv_cache = kv_cache
        self._commands = commands
        self._kv = kv
        self._timeout_seconds = timeout_seconds
        self._progress = RankProgress()

    def run(self) -> None:
        """Runs until rank 0 sends Stop. Raises: RankLostError if rank 0 is gone, and any error of a step."""
        threading.Thread(target=self._serve_kv, name="rank-kv", daemon=True).start()
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
        if device_type(self._kv_cache.device) == "cuda":
            torch.cuda.set_device(self._kv_cache.device)  # by default, a new thread uses the first GPU
        try:
            while True:
                request: KvRequest = self._kv.receive(begins_within_seconds=None)
                self._kv.send(self._answer(request))
        except RankLostError:
            return  # rank 0 is gone; the thread of `run` notices it too

    def _answer(self, request: KvRequest) -> bytes | KvRefused | None:
        if not self._progress.wait_for(request.after, self._timeout_seconds):
            return KvRefused(f"the rank did not reach {request.after} within {self._timeout_seconds:g} s")
        cache, slots = self._kv_cache, request.slots
        try:
            if request.payload is None:
                # On a GPU, the read runs after all work queued so far, which includes the layers up to `request.after`.
                return cache.read(request.plane, request.layers, slots, heads=request.heads).tobytes()
            cache.write(request.plane, request.layers, slots, request.payload, heads=request.heads)
        except InternalError as error:
            return KvRefused(error.message)
        except Exception as error:  # noqa: BLE001 process boundary: rank 0 reports it
            return KvRefused(f"{type(error).__name__}: {error}")
        return None
