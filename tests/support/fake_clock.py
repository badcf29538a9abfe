from __future__ import annotations


class FakeClock:
    """A monotonic clock in seconds that moves only when a test moves it. It is called like time.monotonic."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def __call__(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        assert seconds >= 0
        self._now += seconds
