"""A rank's progress through its commands. Torch-free."""

from __future__ import annotations

import threading

from outrider.engine.ranks.commands import Mark


class RankProgress:
    """One thread advances, others wait."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._at = Mark(0)

    def layer_done(self, layer: int) -> None:
        """Layers rising, from 0."""
        with self._changed:
            self._at = Mark(self._at.num_commands, layer + 1)
            self._changed.notify_all()

    def command_done(self) -> None:
        with self._changed:
            self._at = Mark(self._at.num_commands + 1)
            self._changed.notify_all()

    def wait_for(self, mark: Mark, timeout_seconds: float) -> bool:
        """Whether the mark is reached in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._at >= mark, timeout_seconds)
