from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outrider.engine.cpu_turns import CpuTurns
from outrider.engine.step_progress import StepProgress
from tests.support.fake_clock import FakeClock


def slow_down(owner: object, name: str, progress: StepProgress, clock: FakeClock) -> list[float]:
    """Makes each call of `owner.name` take three seconds. Returns the list of the step's ageing in each call."""
    function, ages = getattr(owner, name), []

    def hang(*args: Any, **options: Any) -> Any:
        before = progress.age_seconds()
        clock.advance(3.0)
        ages.append(progress.age_seconds() - before)
        assert progress.current_step.expected_seconds > 0.0
        return function(*args, **options)

    setattr(owner, name, hang)
    return ages


class ScriptedTurns(CpuTurns):
    """CpuTurns in which the test plays the other processes."""

    def __init__(self, *, num_refusals: int = 0, is_over: bool = False) -> None:
        """`num_refusals` calls of `take` fail before each that succeeds. The method `is_over` returns `is_over`."""
        super().__init__("scripted")
        self.num_refusals = num_refusals
        self.on_refusal: Callable[[], None] = lambda: None
        self.is_held = False
        self.num_taken = 0
        self.kept_for: list[float] = []
        self._is_over = is_over
        self._num_refused = 0

    def take(self, timeout_seconds: float) -> bool:
        assert not self.is_held, "it has one"
        if self._num_refused < self.num_refusals:
            self._num_refused += 1
            self.on_refusal()
            return False
        self._num_refused = 0
        self.is_held = True
        self.num_taken += 1
        return True

    def keep(self, expected_seconds: float) -> bool:
        self.kept_for.append(expected_seconds)
        return self.is_held

    def is_over(self, seconds: float) -> bool:
        assert self.is_held
        return self._is_over

    def give(self) -> None:
        self.is_held = False
