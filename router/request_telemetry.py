"""What metrics and logs are told of one request."""

from __future__ import annotations

from collections.abc import Iterable

from outrider.answer import Finished, Summary
from outrider.errors import OutriderError
from outrider.service.telemetry.logging import get_logger
from outrider.service.telemetry.metrics import RouterMetrics
from outrider.session import Granted
from router.request_record import RequestRecord

_log = get_logger("requests")


class RequestTelemetry:
    """Its admission, its tokens (time to first token, time between tokens, gaps of moves), its moves and its end."""

    def __init__(self, record: RequestRecord, metrics: RouterMetrics) -> None:
        self._record = record
        self._metrics = metrics
        self._request_id = record.request.request_id
        self._last_at: dict[int, float] = {}  # by sample
        self._has_moved = False  # since the last token

    def admitted(self, granted: Granted) -> None:
        record = self._record
        num_prompt_tokens, queue_seconds = len(record.request.prompt_token_ids), record.queue_seconds
        self._metrics.observe_admitted(queue_seconds=queue_seconds, num_prompt_tokens=num_prompt_tokens)
        _log.info(
            "request admitted",
            request_id=self._request_id,
            nodes=list(record.nodes),
            num_prompt_tokens=num_prompt_tokens,
            num_held_tokens=granted.held_prefix_length,
            queue_seconds=round(queue_seconds, 4),
        )

    def tokens(self, sample: int, num_tokens: int) -> None:
        """New tokens of a sample have come together."""
        record = self._record
        now = record.clock()
        if record.first_token_at is None:
            record.first_token_at = now
            self._metrics.observe_first_token(now - record.arrived_at)
        elif self._has_moved and self._last_at:
            self._metrics.observe_move_gap(now - max(self._last_at.values()))
        self._has_moved = False
        last = self._last_at.get(sample)
        self._metrics.observe_tokens(num_tokens, None if last is None else now - last)
        self._last_at[sample] = now

    def moved(self, cause: str, *, node: str, error: OutriderError | None, num_generated_tokens: int) -> None:
        """The next tokens come from another node than the last ones, or are computed with the help of another."""
        self._has_moved = True
        self._record.num_moves += 1
        self._metrics.add_move(cause)
        _log.warning(
            "work moves",
            request_id=self._request_id,
            cause=cause,
            node=node,
            error="" if error is None else error.message,
            num_generated_tokens=num_generated_tokens,
        )

    def finished(self, summary: Summary, samples: Iterable[Finished]) -> None:
        for finished in samples:
            self._metrics.observe_finished_sample(finished.reason)
        usage, metrics = summary.usage, summary.metrics
        self._metrics.observe_finished_request(e2e_seconds=metrics.e2e_seconds)
        _log.info(
            "request finished",
            request_id=self._request_id,
            nodes=metrics.nodes,
            attempts=metrics.attempts,
            num_generated_tokens=usage.num_generated_tokens,
            num_cached_tokens=usage.num_cached_tokens,
            ttft_seconds=round(metrics.ttft_seconds, 4),
            e2e_seconds=round(metrics.e2e_seconds, 4),
        )

    def failed(self, error: OutriderError) -> None:
        self._metrics.add_failure(error.reason)
        _log.warning("request failed", request_id=self._request_id, error=error.message, reason=error.reason)

    def ended(self) -> None:
        """However it did."""
        if self._record.has_mixed_numerics:
            self._metrics.add_mixed_numerics()
