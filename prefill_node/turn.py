"""When a prefill node computes, where other nodes compute on the same processors (ADR 17)."""

from __future__ import annotations

from outrider.engine.cpu_turns import CpuTurns
from outrider.engine.step_clock import StepClock
from outrider.engine.step_progress import StepProgress
from outrider.profile import Part

WAIT_SECONDS = 0.1
"""So often a node that waits for its turn looks whether it is to stop."""


class PrefillTurn:
    """A chunk computes in turns, which end with it or between two layers. Engine thread only, but for its attributes.

    A turn goes on after a chunk that has ended a prompt, if there is another chunk: a decode node that had the
    processors at once would compute a step without the prompt, whose KV is still on its way, and the prompt's first
    token would come a chunk later. It gets them when the KV has arrived.
    """

    def __init__(
        self, turns: CpuTurns, clock: StepClock, progress: StepProgress, *, seconds: float, num_layers: int
    ) -> None:
        """`seconds`: how long others wait for it."""
        self.kv_has_arrived = False  # since a turn of others began; set by any thread
        self.is_stopping = False  # a node that stops waits for nobody: it goes on without; set by any thread
        self._turns = turns
        self._clock = clock
        self._progress = progress
        self._seconds = seconds
        self._num_layers = num_layers
        self._is_held = False

    def take(self) -> None:
        """Waits for a turn, unless one goes on."""
        if self._is_held:
            return
        with self._progress.paused():
            while not self.is_stopping and not self._turns.take(WAIT_SECONDS):
                pass
        self._is_held = True
        self._clock.mark(Part.CPU_TURN)

    def keep(self) -> bool:
        """For the next layer of the chunk that `progress` expects. False: the turn is lost."""
        return self._turns.keep(self._progress.at_hand.expected_seconds / self._num_layers)

    def give_way(self) -> None:
        """Between two layers: lets others compute, if it is time, and waits for the next turn."""
        if not self.keep() or self._is_over():
            self._clock.mark(Part.FORWARD)
            self.give()
            self.take()
            self.keep()

    def end_chunk(self, *, goes_on: bool) -> None:
        """`goes_on`: the chunk has ended a prompt, and there is another one."""
        if not goes_on or self._is_over():
            self.give()

    def give(self) -> None:
        """Idempotent."""
        self._is_held = self.kv_has_arrived = False
        self._turns.give()

    def _is_over(self) -> bool:
        return self._turns.is_over(0.0 if self.kv_has_arrived else self._seconds)
