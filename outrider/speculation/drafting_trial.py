"""Whether drafts are worth asking for, where the drafter computes on the target's processors: measured by trying."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_TRIAL_STEPS = 32
TRIAL_STEPS = 48
SETTLING_STEPS = 16
"""The first steps of a trial: drafters catch up, or what they were asked for still arrives."""

MOST_LOST_STEPS = 16.0
"""A trial that has lost the time of so many usual steps is over."""

FIRST_INTERVAL = 1024
LONGEST_INTERVAL = 16_384
"""Steps from one trial to the next. Each one that confirms what was known doubles the interval."""

SMOOTHING = 1.0 / 32
OUTLIER_FACTOR = 3.0
"""A step that takes longer than this many times the mean counts as this many times."""

BASE_ROWS = 15.0
"""What a step costs beside its sequences, in rows: batches of different sizes are compared by it."""

LEAST_GAIN = 0.02
"""Asking has to be this much faster than not asking."""


@dataclass(slots=True)
class _Rate:
    """Running means of one way to work."""

    tokens: float = 0.0  # of a step, weighed by the size of its batch
    seconds: float = 0.0
    tokens_a_sequence: float = 0.0
    num_steps: int = 0

    @property
    def value(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def observe(self, num_tokens: int, num_sequences: int, seconds: float) -> None:
        if self.num_steps:
            seconds = min(seconds, OUTLIER_FACTOR * self.seconds)
        self.num_steps += 1
        weight = max(SMOOTHING, 1.0 / self.num_steps)
        self.tokens += weight * (_weighed(num_tokens, num_sequences) - self.tokens)
        self.tokens_a_sequence += weight * (num_tokens / num_sequences - self.tokens_a_sequence)
        self.seconds += weight * (seconds - self.seconds)


class DraftingTrial:
    """Does not ask at first, then tries, and from there on does what was faster; tries the other way ever more rarely.

    A drafter on the target's processors slows every step that it is asked in, by an amount that no decode node can know
    from its own steps alone: rates with and without are compared. It never makes a step faster, so steps have to bring
    more tokens as well: else the machine was less busy with others during the trial. Not thread-safe.
    """

    def __init__(self) -> None:
        self.is_asking = False
        self._rates = {True: _Rate(), False: _Rate()}
        self._num_steps = 0  # in this state
        self._interval = FIRST_TRIAL_STEPS  # until the other way is tried
        self._next_interval = FIRST_INTERVAL
        self._is_trial = False
        self._trial = _Rate()
        self._lost_seconds = 0.0  # in this trial

    def observe(self, *, num_tokens: int, num_sequences: int, seconds: float) -> None:
        """One step."""
        if num_sequences <= 0 or seconds <= 0.0:
            return
        self._num_steps += 1
        if self._is_trial:
            self._observe_trial(num_tokens, num_sequences, seconds)
        else:
            if self._num_steps > SETTLING_STEPS:
                self._rates[self.is_asking].observe(num_tokens, num_sequences, seconds)
            if self._num_steps >= self._interval:
                self._go_to(not self.is_asking, is_trial=True)

    def _observe_trial(self, num_tokens: int, num_sequences: int, seconds: float) -> None:
        if self._num_steps == SETTLING_STEPS + 1:
            self._trial = _Rate()
        self._trial.observe(num_tokens, num_sequences, seconds)
        usual = self._rates[not self.is_asking]
        expected_seconds = _weighed(num_tokens, num_sequences) / usual.value
        self._lost_seconds += min(seconds, OUTLIER_FACTOR * self._trial.seconds) - expected_seconds
        if self._num_steps >= TRIAL_STEPS or self._lost_seconds > MOST_LOST_STEPS * usual.seconds:
            self._end_trial()

    def _end_trial(self) -> None:
        self._rates[self.is_asking] = self._trial
        asking, plain = self._rates[True], self._rates[False]
        brings_tokens = asking.tokens_a_sequence > (1.0 + LEAST_GAIN) * plain.tokens_a_sequence
        is_asking = brings_tokens and asking.value > (1.0 + LEAST_GAIN) * plain.value
        confirms = is_asking is not self.is_asking
        self._interval = self._next_interval if confirms else FIRST_INTERVAL
        self._next_interval = min(2 * self._interval, LONGEST_INTERVAL)
        self._go_to(is_asking, is_trial=False)

    def _go_to(self, is_asking: bool, *, is_trial: bool) -> None:  # noqa: FBT001 the state's name
        self.is_asking, self._is_trial = is_asking, is_trial
        self._num_steps = 0
        self._trial, self._lost_seconds = _Rate(), 0.0


def _weighed(num_tokens: int, num_sequences: int) -> float:
    """The tokens of a step, so that batches of different sizes have the same rate."""
    return num_tokens * (num_sequences + BASE_ROWS) / num_sequences
