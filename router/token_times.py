"""When the tokens of one request came: what its latency metrics are made of."""

from __future__ import annotations

from outrider.service.telemetry.metrics import RouterMetrics
from router.request_record import RequestRecord


class TokenTimes:
    """Observes time to first token, time between tokens, and the gap that a move between nodes left."""

    def __init__(self, record: RequestRecord, metrics: RouterMetrics) -> None:
        self._record = record
        self._metrics = metrics
        self._last_at: dict[int, float] = {}  # by sample
        self._has_moved = False  # since the last token

    def moved(self) -> None:
        """The next tokens come from another node than the last ones, or are computed with the help of another."""
        self._has_moved = True

    def observe(self, sample: int, num_tokens: int) -> None:
        """New tokens of a sample have come together."""
        now = self._record.clock()
        if self._record.first_token_at is None:
            self._record.first_token_at = now
            self._metrics.observe_first_token(now - self._record.arrived_at)
        elif self._has_moved and self._last_at:
            self._metrics.observe_move_gap(now - max(self._last_at.values()))
        self._has_moved = False
        last = self._last_at.get(sample)
        self._metrics.observe_tokens(num_tokens=num_tokens, seconds_since_last=None if last is None else now - last)
        self._last_at[sample] = now
