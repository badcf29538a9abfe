"""READ FIRST. The life cycle of one request: admit → open → prefill → stream.

`RequestFlow.run` has all of these steps. `admission.py` and `placement.py` contain the queue and the
choice of nodes, `attempt.py` the nodes' answers, `journal.py` what the client receives.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from outrider.answer import AnswerEvent, Started, Summary
from outrider.errors import AbortedError, InternalError, InvalidRequestError, OutriderError
from outrider.request import Request
from outrider.service.telemetry.logging import get_logger
from outrider.service.telemetry.metrics import RouterMetrics
from outrider.session import Granted, Rejected, RejectReason
from router.admission import Admission, Waiting
from router.attempt import Attempt
from router.config import RouterConfig
from router.detokenizer import NoText
from router.journal import EndRules, Journal, JournalBudget, journal_bytes
from router.node_directory import ServedModel
from router.placement import Placement
from router.request_record import RequestRecord
from router.stop_strings import StopStringMatcher
from router.text import AnswerText
from router.trailers import Trailers, answer_trailers

_log = get_logger("requests")


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowServices:
    """What every request uses."""

    config: RouterConfig
    admission: Admission
    placement: Placement
    journals: JournalBudget
    metrics: RouterMetrics
    router_address: str


class RequestFlow:
    """One request, from its arrival to its Summary. Owned by the event loop.

    `run` frees everything when it is closed or cancelled, at whatever point: the place in
    the queue, the sequence group on the decode node, the Prefill call, the journal.
    """

    def __init__(self, record: RequestRecord, served: ServedModel, services: FlowServices) -> None:
        self._record = record
        self._request = record.request
        self._served = served
        self._services = services
        eos_token_ids = () if self._request.stop.ignore_eos else served.info.eos_token_ids
        self._stop_token_ids = tuple(sorted({*eos_token_ids, *self._request.stop.token_ids}))
        self._journal = _make_journal(self._request, served, self._stop_token_ids)
        self._waiting = Waiting(self._request)
        self._attempt: Attempt | None = None
        self._news = asyncio.Event()
        self._is_aborted = False
        self._failure: OutriderError | None = None  # told from outside, by `fail`

    async def run(self) -> AsyncGenerator[list[AnswerEvent], None]:
        """The answer's events, everything new at each turn: the caller's pace never holds a node.

        Raises: CapacityError when queue or journals are full; PeerLostError when a node
        with work of this request is lost; InvalidRequestError for what fits no node.
        """
        try:
            with self._services.journals.hold(journal_bytes(self._request)):
                if not self._journal.is_finished:  # unless the tokens that the client brought end the answer
                    await self._admit()
                yield [self._started()]
                while events := await self._next_events():
                    yield events
                yield [await self._summary()]
        except OutriderError as error:
            self._services.metrics.add_failure(error.reason)
            _log.warning(
                "request failed", request_id=self._request.request_id, error=error.message, reason=error.reason
            )
            raise
        except (asyncio.CancelledError, GeneratorExit):
            _log.info("client left", request_id=self._request.request_id)
            raise
        finally:
            if self._attempt is not None:
                self._attempt.close()
            if self._record.has_mixed_numerics:
                self._services.metrics.add_mixed_numerics()

    def trailers(self) -> Trailers:
        """What the call's trailers say of the answer so far."""
        return answer_trailers(self._record, num_generated_tokens=self._journal.num_generated_tokens)

    def abort(self) -> bool:
        """Stops the request everywhere, at once; `run` then ends as the contract says. False: it had ended."""
        if self._journal.is_finished:
            return False
        self._is_aborted = True
        self._journal.abort()
        self._record.mark_end()
        aborted = AbortedError("the request was aborted")
        self._services.admission.withdraw(self._waiting, aborted)
        if self._attempt is not None:
            self._attempt.close()
        self._news.set()
        return True

    def fail(self, error: OutriderError) -> None:
        """Stops the request everywhere; `run` then raises `error`. What has ended stays as it is."""
        if self._journal.is_finished:
            return
        self._failure = error
        self._services.admission.withdraw(self._waiting, error)
        if self._attempt is not None:
            self._attempt.fail(error)
        self._news.set()

    async def _admit(self) -> None:
        """Queue → place → Open, until a decode node grants; then the prefill starts."""
        while not self._is_aborted:
            try:
                place = await self._services.admission.wait_for_place(self._waiting)
                self._attempt = Attempt(
                    place=place,
                    journal=self._journal,
                    record=self._record,
                    metrics=self._services.metrics,
                    wake=self._news.set,
                )
                if self._failure is not None:  # `fail` came when the place had just been given out
                    raise self._failure
                self._record.use_node(place.decode.name, place.decode.numerics)
                answer = await self._attempt.open(
                    stop_token_ids=self._stop_token_ids,
                    timeout_seconds=self._services.config.open_timeout_seconds,
                )
            except AbortedError:
                if self._journal.is_finished:  # by `abort`
                    return
                raise
            if isinstance(answer, Granted):
                self._take_grant(answer)
                return
            self._take_rejection(answer)

    def _take_grant(self, granted: Granted) -> None:
        attempt = self._attempt
        assert attempt is not None, "a grant answers an attempt"
        self._record.num_tokens_to_compute = granted.num_tokens_to_compute
        attempt.start_prefill(
            granted,
            fingerprint=self._served.info.fingerprint,
            kv_ready_timeout_seconds=self._services.config.kv_ready_timeout_seconds,
        )
        num_prompt_tokens = len(self._request.prompt_token_ids)
        self._services.metrics.observe_admitted(
            queue_seconds=self._record.queue_seconds, num_prompt_tokens=num_prompt_tokens
        )
        _log.info(
            "request admitted",
            request_id=self._request.request_id,
            nodes=list(self._record.nodes),
            num_prompt_tokens=num_prompt_tokens,
            num_held_tokens=granted.held_prefix_length,
            queue_seconds=round(self._record.queue_seconds, 4),
        )

    def _take_rejection(self, rejected: Rejected) -> None:
        """The request goes back to its place in the queue, unless no node can ever take it."""
        attempt, self._attempt = self._attempt, None
        assert attempt is not None, "a rejection answers an attempt"
        decode = attempt.place.decode
        self._record.nodes.clear()
        attempt.leave(was_refused=rejected.reason in (RejectReason.NO_ROOM, RejectReason.DRAINING))
        attempt.close()
        match rejected.reason:
            case RejectReason.TOO_LARGE:
                info = decode.info
                self._waiting.excluded |= {info.incarnation if info is not None else b""}
                if not self._services.placement.can_fit_elsewhere(self._waiting.excluded):
                    raise InvalidRequestError(rejected.message, field="prompt", reason="TOO_LARGE")
            case RejectReason.INVALID:
                raise InternalError(f"decode node {decode.name} calls the request invalid: {rejected.message}")

    async def _next_events(self) -> list[AnswerEvent]:
        """Everything new, as soon as there is something; empty once all samples' ends have been told.

        Raises: the attempt's failure, after what came before it.
        """
        while True:
            self._news.clear()
            events = self._journal.take_events()
            if events or self._journal.is_finished:
                return events
            if self._attempt is not None and self._attempt.failure is not None:
                raise self._attempt.failure
            await self._news.wait()

    def _started(self) -> Started:
        return Started(
            request_id=self._request.request_id,
            num_prompt_tokens=len(self._request.prompt_token_ids),
            seed=self._request.sampling.seed,
            model=self._served.info.name,
            router=self._services.router_address,
        )

    async def _summary(self) -> Summary:
        self._record.mark_end()
        if self._attempt is not None:
            self._attempt.leave()
            await self._attempt.wait_for_prefill_answer()
        for sample in self._journal.samples:
            if sample.finished is not None:
                self._services.metrics.observe_finished_sample(sample.finished.reason)
        summary = self._record.summary(num_generated_tokens=self._journal.num_generated_tokens)
        metrics = summary.metrics
        self._services.metrics.observe_finished_request(e2e_seconds=metrics.e2e_seconds)
        self._services.admission.observe_service(max(metrics.e2e_seconds - metrics.queue_seconds, 0.0))
        _log.info(
            "request finished",
            request_id=self._request.request_id,
            nodes=metrics.nodes,
            num_generated_tokens=summary.usage.num_generated_tokens,
            num_cached_tokens=summary.usage.num_cached_tokens,
            ttft_seconds=round(metrics.ttft_seconds, 4),
            e2e_seconds=round(metrics.e2e_seconds, 4),
        )
        return summary


def _make_journal(request: Request, served: ServedModel, stop_token_ids: tuple[int, ...]) -> Journal:
    stop, output, sampling = request.stop, request.output, request.sampling
    needs_text = bool(stop.strings) or not output.token_ids_only

    def make_text() -> AnswerText:
        detokenizer = (
            served.tokenizer.detokenizer(
                skip_special_tokens=output.skip_special_tokens, context=request.prompt_token_ids
            )
            if needs_text
            else NoText()
        )
        matcher = StopStringMatcher(stop.strings, include_match=stop.include_match)
        return AnswerText(detokenizer, matcher, min_tokens=sampling.min_tokens)

    rules = EndRules(
        stop_token_ids=frozenset(stop_token_ids), min_tokens=sampling.min_tokens, max_tokens=sampling.max_tokens
    )
    return Journal(request, rules, make_text)
