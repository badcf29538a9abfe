"""Keeps the latest requests' records, and makes a request's Summary, trailers and trace from its record."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from opentelemetry.trace import INVALID_SPAN

from outrider.answer import Finished, KvTransferMetrics, RequestMetrics, Summary, Usage
from outrider.errors import OutriderError
from outrider.node_stamp import NODES_KEY, format_node_versions
from outrider.prefill import PrefillFigures
from outrider.request import FinishReason, VerificationMethod
from outrider.service.telemetry.logging import get_logger
from outrider.service.telemetry.metrics import RouterMetrics
from outrider.service.telemetry.tracing import NO_TRACER, Tracer, fail, nanoseconds
from router.observe.record import AttemptRecord, RequestRecord
from router.observe.spans import RequestState

MAX_RECORDS = 256
"""Maximum requests whose records a router keeps for its page."""
MAX_STEPS = 100_000
"""Maximum recorded steps of all requests together, which take about 20 MB."""

Trailers = tuple[tuple[str, str], ...]

NOTHING_GENERATED: Trailers = (("outrider-tokens", "0"),)
"""Trailers of a call that was refused before it became a request."""

_log = get_logger("requests")


class Records:
    """The latest requests' records. Owned by the event loop.

    If there are more than `max_records` requests or `max_steps` steps in total, the records of the requests that
    ended first are evicted.
    A request whose record is evicted while it runs records no more steps.
    """

    def __init__(
        self,
        max_records: int = MAX_RECORDS,
        *,
        records_tokens: bool = False,
        max_steps: int = MAX_STEPS,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        """`records_tokens`: whether token ids are recorded, which reveal the answer's text."""
        self._max_records = max_records
        self._num_free_steps = max_steps
        self.records_tokens = records_tokens
        self._tracer = tracer
        self._serials = itertools.count(1)
        self._running: dict[int, RequestRecord] = {}  # by serial, oldest first
        self._ended: dict[int, RequestRecord] = {}  # by serial, in the order in which they ended

    def __iter__(self) -> Iterator[RequestRecord]:
        """Yields the records, the latest first."""
        return iter(sorted((*self._running.values(), *self._ended.values()), key=lambda each: -each.serial))

    def find(self, serial: int) -> RequestRecord | None:
        return self._running.get(serial) or self._ended.get(serial)

    def begin(self, request_id: str, metrics: RouterMetrics) -> RequestRecord:
        """Begins the record of a request that has just arrived. The caller ends it with `end`."""
        record = RequestRecord(
            next(self._serials),
            request_id,
            metrics,
            self._take_room,
            records_tokens=self.records_tokens,
            tracer=self._tracer,
            traced=self._tracer.begin("generate"),
        )
        self._running[record.serial] = record
        while len(self._running) + len(self._ended) > self._max_records:
            self._forget(self._ended or self._running)
        return record

    @contextmanager
    def beginning(self, request_id: str, metrics: RouterMetrics) -> Iterator[RequestRecord]:
        """Begins a record like `begin`; an exception in the block ends the record."""
        record = self.begin(request_id, metrics)
        try:
            yield record
        except OutriderError as error:
            self.end(record, error)
            raise
        except BaseException:
            self.end(record, None)
            raise

    def end(self, record: RequestRecord, error: OutriderError | None) -> None:
        """Ends the record and its trace, whether the request was answered, aborted or failed. Idempotent."""
        record.end(error)
        if record.traced.is_recording():
            _end_trace(record, reason="" if error is None else error.reason)
        record.attempts.clear()
        record.last_token_at.clear()
        if self._running.pop(record.serial, None) is not None:
            self._ended[record.serial] = record

    def _take_room(self, size: int) -> bool:
        while self._num_free_steps < size and self._ended:
            self._forget(self._ended)
        if self._num_free_steps < size:
            return False
        self._num_free_steps -= size
        return True

    def _forget(self, records: dict[int, RequestRecord]) -> None:
        """Evicts the oldest of these records and frees its steps, even while a caller still holds the record."""
        record = records.pop(next(iter(records)))
        record.reserve_steps = lambda _size: False
        self._num_free_steps += record.size
        record.steps, record.size = [], 0


# ------------------------------------------------------------ results made from a record


def finish(record: RequestRecord, samples: Iterable[Finished], *, num_longest: int) -> Summary:
    """Records that the answer is complete, and returns its Summary. `num_longest`: tokens of the longest sample."""
    found = [attempt.num_cached_tokens for attempt in record.attempts]
    num_cached_tokens = min((number for number in found if number is not None), default=0)
    record.num_cached_tokens = max(min(num_cached_tokens, record.num_prompt_tokens), 0)
    record.outcome = RequestState.FINISHED
    for finished in samples:
        record.metrics.observe_finished_sample(finished.reason)
        record.finish_reasons.append(finished.reason.name.lower())
        if finished.reason is FinishReason.ABORTED:
            record.outcome = RequestState.ABORTED
    prefills = [attempt.filled_by for attempt in record.attempts]
    metrics = RequestMetrics(
        queue_seconds=record.since_arrival(record.admitted_at),
        ttft_seconds=record.since_arrival(record.first_token_at),
        e2e_seconds=record.since_arrival(record.ended_at),
        prefill_seconds=sum(prefill.compute_seconds for prefill in prefills if prefill is not None),
        kv_transfer=_kv_transfer(record.attempts),
        speculation=record.speculation.metrics(),
        attempts=1 + record.num_moves,
        nodes=record.nodes,
    )
    usage = Usage(
        num_prompt_tokens=record.num_prompt_tokens,
        num_cached_tokens=record.num_cached_tokens,
        num_generated_tokens=record.num_generated_tokens,
        num_blended_tokens=max((prefill.num_blended_tokens for prefill in prefills if prefill), default=0),
        num_recomputed_tokens=max((prefill.num_recomputed_tokens for prefill in prefills if prefill), default=0),
    )
    summary = Summary(request_id=record.request_id, usage=usage, metrics=metrics)
    record.metrics.observe_finished_request(summary, num_longest=num_longest, adapter=record.adapter)
    _log.info(
        "request finished",
        request_id=record.request_id,
        nodes=metrics.nodes,
        attempts=metrics.attempts,
        num_generated_tokens=usage.num_generated_tokens,
        num_cached_tokens=usage.num_cached_tokens,
        ttft_seconds=round(metrics.ttft_seconds, 4),
        e2e_seconds=round(metrics.e2e_seconds, 4),
    )
    return summary


def _kv_transfer(attempts: Iterable[AttemptRecord]) -> KvTransferMetrics:
    """Returns sums over attempts with a KV transfer. Times come from KvReady if the prefill node has not answered."""
    moved = [
        (ready, attempt.filled_by or PrefillFigures(transfer_seconds=ready.transfer_seconds))
        for attempt in attempts
        if (ready := attempt.kv_ready) is not None and ready.connector
    ]
    return KvTransferMetrics(
        connector=moved[0][0].connector if moved else "",
        bytes=sum(ready.kv_bytes for ready, _ in moved),
        seconds=sum(prefill.transfer_seconds for _, prefill in moved),
        exposed_seconds=sum(min(prefill.exposed_seconds, prefill.transfer_seconds) for _, prefill in moved),
    )


def make_trailers(record: RequestRecord, *, is_durable: bool) -> Trailers:
    """Returns a call's trailers. A value that was not measured is left out.

    `is_durable`: False if the request is resumable, but missing from the store.
    """
    trailers = [("outrider-tokens", str(record.num_generated_tokens))]
    if record.first_token_at is not None:
        trailers.append(("outrider-ttft-ms", f"{record.since_arrival(record.first_token_at) * 1e3:.1f}"))
    if record.speculation.num_draft_tokens:
        trailers.append(("outrider-acceptance-length", f"{record.speculation.metrics().mean_acceptance_length:.2f}"))
    if record.verification_method is not VerificationMethod.COUPLED:
        trailers.append(("outrider-verification", record.verification_method.label))
    if record.stamps:
        trailers.append((NODES_KEY, format_node_versions(record.stamps)))
    if not is_durable:
        trailers.append(("outrider-store", "lost"))
    return tuple(trailers)


def _end_trace(record: RequestRecord, *, reason: str) -> None:
    """Ends the trace of a request that has ended. `reason`: why the request failed; empty if it did not fail."""
    for attempt in record.attempts:
        _end_attempt(record, attempt)
    assert record.ended_at is not None
    whole, num_input_tokens, num_output_tokens = record.traced, record.num_prompt_tokens, record.num_generated_tokens
    whole.set_attributes(
        {
            "gen_ai.usage.input_tokens": num_input_tokens,
            "gen_ai.usage.output_tokens": num_output_tokens,
            "gen_ai.usage.cache_read.input_tokens": record.num_cached_tokens,
            "gen_ai.response.finish_reasons": record.finish_reasons,
            # The names that vLLM uses, for existing dashboards.
            "gen_ai.usage.prompt_tokens": num_input_tokens,
            "gen_ai.usage.completion_tokens": num_output_tokens,
            "gen_ai.latency.e2e": record.ended_at - record.arrived_at,
            "outrider.state": record.state,
            "outrider.num_attempts": record.num_attempts,
            "outrider.num_moves": record.num_moves,
            "outrider.mean_acceptance_length": record.speculation.metrics().mean_acceptance_length,
        }
    )
    if record.admitted_at is not None:
        whole.set_attribute("gen_ai.latency.time_in_queue", record.admitted_at - record.arrived_at)
    if record.first_token_at is not None:
        whole.set_attribute("gen_ai.latency.time_to_first_token", record.first_token_at - record.arrived_at)
    if reason:
        fail(whole, reason)
    whole.end(nanoseconds(record.ended_at))
    record.traced = INVALID_SPAN


def _end_attempt(record: RequestRecord, attempt: AttemptRecord) -> None:
    """Ends the attempt's span as of the time when the attempt left its decode node.

    The span is ended only now, because the reason why work moved becomes known only after the attempt.
    """
    traced, node, last = attempt.traced, attempt.decode.name, attempt.decoding or attempt.opening
    traced.set_attributes({"outrider.attempt": attempt.index, "outrider.decode_node": node})
    causes = [move.cause for move in record.moves if last is not None and move.node == node and move.at >= last.start]
    if causes:
        traced.set_attribute("outrider.moved_because", causes[0])
        if causes[0] != "draining":
            fail(traced, causes[0])
    traced.end(None if last is None or last.end is None else nanoseconds(last.end))
