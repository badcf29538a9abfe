"""Turns of a prefill node on processors that it shares with other nodes (ADR 17)."""

from __future__ import annotations

from outrider.engine.cpu_turns import CpuTurns
from outrider.engine.step_clock import StepClock
from outrider.engine.step_progress import StepProgress
from outrider.profile import Part

TURN_SECONDS = 0.12
"""Seconds after which a turn ends at the end of a layer, if other nodes on the same processors wait.

A shorter turn makes running answers faster and first tokens later.
"""
WAIT_SECONDS = 0.1
"""Seconds between two checks for a stop while the node waits for its turn."""


class PrefillTurn:
    """The turns in which chunks are computed. A turn ends after a chunk or between two layers.

    After a chunk that completes a prompt, the turn continues if there is another chunk. Otherwise a decode node would
    get the processors at once and compute a step without that prompt, whose KV is still in transfer, and the prompt's
    first token would come a chunk later. The turn ends when the KV has arrived. Other threads may only set the public
    attributes.
    """

    def __init__(self, turns: CpuTurns, clock: StepClock, progress: StepProgress, *, num_layers: int) -> None:
        self.kv_has_arrived = False  # whether KV has arrived since this node last gave its turn back; set by any thread
        self.is_stopping = False  # if true, the node continues without a turn; set by any thread
        self._turns = turns
        self._clock = clock
        self._progress = progress
        self._num_layers = num_layers
        self._is_held = False

    def take(self) -> None:
        """Waits for a turn, unless the last one continues."""
        if self._is_held:
            return
        with self._progress.paused():
            while not self.is_stopping and not self._turns.take(WAIT_SECONDS):
                pass
        self._is_held = True
        self._clock.mark(Part.CPU_TURN)

    def keep(self) -> bool:
        """Extends the turn by the expected time of a layer of this chunk. Returns False if the turn was lost."""
        return self._turns.keep(self._progress.current_step.expected_seconds / self._num_layers)

    def yield_turn(self) -> None:
        """Lets others compute between two layers if the turn is over, and waits for the next turn."""
        if not self.keep() or self._is_over():
            self._clock.mark(Part.FORWARD)
            self.give()
            self.take()
            self.keep()

    def end_chunk(self, *, continues: bool) -> None:
        """Ends the turn unless it may continue. `continues`: the chunk completed a prompt, and another follows."""
        if not continues or self._is_over():
            self.give()

    def give(self) -> None:
        """Gives the turn back. Idempotent."""
        self._is_held = self.kv_has_arrived = False
        self._turns.give()

    def _is_over(self) -> bool:
        return self._turns.is_over(0.0 if self.kv_has_arrived else TURN_SECONDS)
