"""READ FIRST. How one request is served: attempts on nodes, one after the other, until the answer is complete.

`RequestFlow.run` is the whole story. The queue and the choice of nodes are in
`admission.py` and `placement.py`, one try on one decode node in `attempt.py`, what the
client is told in `answer.py`, and the client's streams in `running_requests.py`.

Tokens depend on model, prompt, parameters and seed only. So whatever is lost, another
attempt goes on from the tokens that the answer has; and where nodes compute alike, two
attempts may run at once: the first token of a position counts, a second one is compared.
Requests whose drafts are not verified by coupled sampling are the exception: their tokens depend
on drafts too, so there is one attempt at a time, and the next begins where it was lost.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from outrider.answer import Started
from outrider.errors import InternalError, InvalidRequestError, OutriderError, PeerLostError
from outrider.faults import fault_point
from outrider.service.telemetry.metrics import RouterMetrics
from outrider.session import NO_SPECULATION, Granted, Rejected, RejectReason, SampleDone, SampleTokens
from router.admission import Admission, Waiting
from router.answer import Answer
from router.answer_budget import AnswerAccount, AnswerBudget
from router.attempt import Attempt, AttemptListener, AttemptSettings, Completed, Fatal, Lost, Refused
from router.config import RouterConfig
from router.departures import Departures
from router.hedge_budget import HedgeBudget
from router.node_directory import EXACT_NUMERICS, ServedModel
from router.placement import Demand, Place, Placement
from router.request_record import RequestRecord
from router.request_telemetry import RequestTelemetry

MAX_LOSSES = 5
"""So many attempts may be lost without a new token: a request that kills nodes must not kill them all."""
HEDGE_RETRY_SECONDS = 0.1
"""How often a place is looked for while an attempt is suspect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowServices:
    """What every request uses."""

    config: RouterConfig
    admission: Admission
    placement: Placement
    hedges: HedgeBudget
    answers: AnswerBudget
    departures: Departures
    metrics: RouterMetrics
    router_address: str


class RequestFlow(AttemptListener):
    """Computes one answer. Owned by the event loop; nothing here waits for a client.

    `run` frees everything when it ends or is cancelled, at whatever point: the place in the
    queue, the sequence groups on decode nodes, the Prefill calls.
    """

    def __init__(
        self,
        answer: Answer,
        record: RequestRecord,
        served: ServedModel,
        services: FlowServices,
        *,
        account: AnswerAccount,
        stop_token_ids: tuple[int, ...],
        client: str = "",
        was_admitted: bool = False,
    ) -> None:
        """`client`: whose share of the queue it takes. `was_admitted`: by another router: it is not refused here."""
        self._answer = answer
        self._request = answer.request
        self._record = record
        self._served = served
        self._services = services
        self._account = account
        self._settings = AttemptSettings(
            fingerprint=served.info.fingerprint,
            stop_token_ids=stop_token_ids,
            open_timeout_seconds=services.config.open_timeout_seconds,
            kv_ready_timeout_seconds=services.config.kv_ready_timeout_seconds,
            hedges=services.hedges,
        )
        self._waiting = Waiting(
            self._demand(), priority=self._request.priority, client=client, num_samples=self._request.sampling.n
        )
        self._waiting.has_waited = self._waiting.had_place = was_admitted
        self._seeking: asyncio.Task[Place] | None = None  # a place, in the queue
        self._attempts: list[Attempt] = []  # oldest first; two while work moves
        self._last: Attempt | None = None  # of those that have completed: its figures may still come
        self._excluded: frozenset[bytes] = frozenset()  # decode nodes that the request can never fit on
        self._num_losses = 0  # since the last new token
        self._telemetry = RequestTelemetry(record, services.metrics)
        self._retry: asyncio.TimerHandle | None = None
        self._news = asyncio.Event()

    async def run(self) -> None:
        """Until the answer has ended, with a summary or a failure. Never raises OutriderErrors."""
        answer = self._answer
        try:
            while not (answer.is_complete or answer.has_ended):
                self._news.clear()
                self._settle()
                self._seek()
                await self._news.wait()
            if not answer.has_ended:
                await self._conclude()
        except OutriderError as error:
            answer.fail(error)
        finally:
            self._free()
            self._telemetry.ended()
            if answer.failure is not None:
                self._telemetry.failed(answer.failure)

    def abort(self) -> bool:
        """Ends the unfinished samples, and stops the request everywhere. False: it had ended."""
        if self._answer.is_complete or self._answer.has_ended:
            return False
        self._answer.abort()
        self._record.mark_end()
        self._free()
        self._news.set()
        return True

    def fail(self, error: OutriderError) -> None:
        """Ends the answer with this error, unless it has ended."""
        if not self._answer.is_complete:
            self._answer.fail(error)
            self._free()
            self._news.set()

    # ------------------------------------------------------------ the state of things

    def _settle(self) -> None:
        """Drops the attempts that have an outcome, and one of two where one is enough. Raises: OutriderError."""
        for attempt in tuple(self._attempts):
            match attempt.outcome:
                case Completed():
                    self._drop(attempt)
                    self._last = attempt
                case Refused(rejected):
                    self._drop(attempt)
                    self._forget_hedge(attempt)
                    self._take_refusal(attempt, rejected)
                case Lost(error, cause):
                    is_hedge = attempt is not self._attempts[0]
                    self._drop(attempt)
                    self._forget_hedge(attempt)
                    if not is_hedge:  # without it the work goes on where it was
                        self._take_loss(attempt, error, cause)
                case Fatal(error):
                    raise error
        if len(self._attempts) == 2:
            older, newer = self._attempts
            if not (older.is_suspect or older.is_leaving):  # it is believed again
                self._drop(newer)
            elif newer.has_tokens:
                self._drop(older)
                self._note_move(older, "draining" if older.is_leaving else "decode_late")

    def _seek(self) -> None:
        """Opens another attempt where one is needed, or asks for a place for it. Raises: OutriderError."""
        if self._seeking is not None:
            if self._seeking.done():
                task, self._seeking = self._seeking, None
                if task.exception() is None:
                    self._open(task.result())
                elif not self._attempts:
                    task.result()
                else:  # what runs goes on where it is
                    self._look_again_soon()
            return
        if not self._attempts:
            if self._last is not None:
                raise InternalError("a decode node says that all samples have ended, and some have not")
            self._seek_in_queue(self._excluded)
        elif len(self._attempts) == 1:
            self._seek_beside(self._attempts[0])

    def _seek_beside(self, attempt: Attempt) -> None:
        """A second attempt where the first is late or its node drains, and both compute the same tokens."""
        is_in_doubt = attempt.is_leaving or attempt.is_suspect
        computes_the_same = self._request.is_reproducible and attempt.numerics.startswith(EXACT_NUMERICS)
        if not (is_in_doubt and computes_the_same):
            return
        placement = self._services.placement
        excluded = self._excluded | {attempt.incarnation} | placement.of_other_numerics(attempt.numerics)
        if not placement.has_timely_decode_node(excluded):
            self._look_again_soon()
        elif attempt.is_leaving:
            self._waiting.has_waited = True
            self._seek_in_queue(excluded)
        else:
            self._hedge(attempt, excluded)

    def _seek_in_queue(self, excluded: frozenset[bytes]) -> None:
        self._waiting.demand = self._demand(excluded)
        self._seeking = asyncio.create_task(self._services.admission.wait_for_place(self._waiting), name="place")
        self._seeking.add_done_callback(lambda _task: self._news.set())

    def _hedge(self, suspect: Attempt, excluded: frozenset[bytes]) -> None:
        """Opens a second attempt now, or looks again soon; never by way of the queue."""
        services = self._services
        late = suspect.place.decode
        place = None
        if services.hedges.may_move(late):
            place = services.placement.place(self._demand(excluded), must_be_timely=True)
        if place is None:
            self._look_again_soon()
            return
        services.hedges.add_move(late)
        services.metrics.add_hedge()
        self._open(place)
        self._attempts[-1].hedged = late

    def _forget_hedge(self, attempt: Attempt) -> None:
        if attempt.hedged is not None and not attempt.has_tokens:
            self._services.hedges.take_back(attempt.hedged)

    def _look_again_soon(self) -> None:
        if self._retry is None:
            self._retry = asyncio.get_running_loop().call_later(HEDGE_RETRY_SECONDS, self._look_again)

    def _look_again(self) -> None:
        self._retry = None
        self._news.set()

    def _open(self, place: Place) -> None:
        fault_point("router.admitted")
        attempt = Attempt(
            place=place, demand=self._demand(), answer=self._answer, settings=self._settings, listener=self
        )
        self._attempts.append(attempt)
        attempt.start()

    def _demand(self, excluded: frozenset[bytes] = frozenset()) -> Demand:
        """The first unfinished sample's tokens: the KV of the others begins alike."""
        samples = self._answer.unfinished_samples()
        generated = samples[0].generated_token_ids if samples else ()
        return Demand(self._request.prompt_token_ids + generated, excluded, self._request.cache_salt)

    def _drop(self, attempt: Attempt) -> None:
        self._attempts.remove(attempt)
        if not isinstance(attempt.outcome, Completed):
            attempt.end()

    def _free(self) -> None:
        """Everything on nodes and in the queue. Idempotent."""
        for attempt in tuple(self._attempts):
            self._drop(attempt)
            attempt.end()
        if self._last is not None:
            self._last.end()
        if self._seeking is not None:
            task, self._seeking = self._seeking, None
            task.cancel()
            task.add_done_callback(_release_place)
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None

    # ------------------------------------------------------------ outcomes

    def _take_refusal(self, attempt: Attempt, rejected: Rejected) -> None:
        """The request goes back to its turn in the queue, unless no node can ever take it."""
        self._waiting.has_waited |= self._record.admitted_at is not None  # then it is not refused now
        match rejected.reason:
            case RejectReason.TOO_LARGE:
                self._excluded |= {attempt.incarnation}
                if not self._attempts and not self._services.placement.can_fit_elsewhere(self._excluded):
                    raise InvalidRequestError(rejected.message, field="prompt", reason="TOO_LARGE")
            case RejectReason.INVALID:
                name = attempt.place.decode.name
                raise InternalError(f"decode node {name} calls the request invalid: {rejected.message}")

    def _take_loss(self, attempt: Attempt, error: PeerLostError, cause: str) -> None:
        """Raises: PeerLostError after too many of them without a new token."""
        self._num_losses += not self._attempts
        if self._num_losses > MAX_LOSSES:
            message = f"{self._num_losses} attempts were lost without a new token; the last: {error.message}"
            raise PeerLostError(message, node=error.node)
        self._waiting.has_waited = True  # admitted before: it is not refused now
        self._note_move(attempt, cause, error)

    def _note_move(self, attempt: Attempt, cause: str, error: PeerLostError | None = None) -> None:
        num_tokens = self._answer.num_generated_tokens
        self._telemetry.moved(cause, node=attempt.place.decode.name, error=error, num_generated_tokens=num_tokens)

    async def _conclude(self) -> None:
        fault_point("router.before_finish")
        self._record.mark_end()
        last = self._last or next(iter(self._attempts), None)
        if last is not None:
            await last.wait_for_figures()
        self._begin()
        summary = self._record.summary(num_generated_tokens=self._answer.num_generated_tokens)
        metrics = summary.metrics
        self._services.admission.observe_service(max(metrics.e2e_seconds - metrics.queue_seconds, 0.0))
        self._telemetry.finished(summary, [sample.finished for sample in self._answer.samples if sample.finished])
        self._answer.close(summary)

    # ------------------------------------------------------------ what attempts say

    def on_attempt_changed(self) -> None:
        self._news.set()

    def on_granted(self, attempt: Attempt, granted: Granted) -> None:
        self._record.attempts.append(attempt.figures)
        self._record.use_node(attempt.place.decode.name, attempt.numerics)
        if self._record.admitted_at is not None:
            return
        self._record.mark_admitted()
        self._telemetry.admitted(granted)
        self._begin()

    def on_prefill(self, attempt: Attempt) -> None:
        link = attempt.place.prefill
        self._record.use_node(link.name, link.numerics)

    def on_prefill_moved(self, attempt: Attempt, error: PeerLostError) -> None:
        self._note_move(attempt, "prefill_lost", error)

    def on_tokens(self, attempt: Attempt, tokens: SampleTokens) -> None:
        fault_point("router.token")
        num_new, has_ended = self._answer.take(tokens)
        if tokens.speculation is not NO_SPECULATION:
            self._record.speculation.add(tokens.speculation)
        if num_new:
            self._telemetry.tokens(tokens.sample, num_new)
            self._num_losses = 0
            try:
                self._account.grow(num_new)
            except OutriderError as error:
                self.fail(error)
        if has_ended:
            self._stop_sample(attempt, tokens.sample)
        if len(self._attempts) > 1:
            self._news.set()

    def on_done(self, attempt: Attempt, done: SampleDone) -> None:
        self._answer.finish(done)
        self._stop_sample(attempt, done.sample)

    def _stop_sample(self, attempt: Attempt, sample: int) -> None:
        """A sample has ended. The node that ended it knows, unless a stop string did."""
        finished = self._answer.samples[sample].finished
        for other in tuple(self._attempts):
            if other is not attempt or (finished is not None and finished.stop_string is not None):
                other.cancel_sample(sample)
        if self._answer.is_complete:
            self._record.mark_end()
            self._news.set()

    def _begin(self) -> None:
        started = Started(
            request_id=self._request.request_id,
            num_prompt_tokens=len(self._request.prompt_token_ids),
            seed=self._request.sampling.seed,
            model=self._served.info.name,
            router=self._services.router_address,
        )
        self._answer.begin(started)


def _release_place(task: asyncio.Task[Place]) -> None:
    """Of a place that was given out when it was no longer wanted."""
    if not task.cancelled() and task.exception() is None:
        task.result().release()
