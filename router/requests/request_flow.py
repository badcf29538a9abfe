"""READ FIRST. How one request is served: attempts on nodes, one after the other, until the answer is complete.

`RequestFlow.run` is the whole story. The queue and the choice of nodes are in
`request_queue.py` and `placement.py`, one try on one decode node in `attempt.py`, what the
client is told in `answer.py`, and the client's streams in `live_request.py`.

Tokens depend on model, prompt, parameters and seed only. So whatever is lost, another
attempt goes on from the tokens that the answer has; and where nodes compute alike, two
attempts may run at once: the first token of a position counts, a second one is compared.
Requests whose drafts are not verified by coupled sampling are the exception: their tokens depend
on drafts too, so there is one attempt at a time, and the next begins where it was lost.
"""

from __future__ import annotations

import asyncio

from outrider.errors import InternalError, InvalidRequestError, OutriderError, PeerLostError
from outrider.faults import fault_point
from outrider.session import Rejected, RejectReason
from outrider.v1 import router_pb2
from router.observe.timeline import SpanKind
from router.requests.attempt import Attempt
from router.requests.work import Completed, Fatal, Lost, Refused, Work
from router.scheduling.placement import Demand, Place
from router.scheduling.request_queue import QueuedRequest

HEDGE_RETRY_SECONDS = 0.1
"""How often a place is looked for while an attempt is suspect."""


class RequestFlow:
    """Computes one answer. Owned by the event loop; nothing here waits for a client.

    `run` frees everything when it ends or is cancelled, at whatever point: the place in the
    queue, the sequence groups on decode nodes, the Prefill calls.
    """

    def __init__(self, work: Work, *, client: str = "", was_admitted: bool = False) -> None:
        """`client`: whose share of the queue it takes. `was_admitted`: by another router: it is not refused here."""
        self._work = work
        self._answer = work.answer
        self._services = work.services
        self._excluded: frozenset[bytes] = frozenset()  # decode nodes that the request can never fit on
        self._waiting = QueuedRequest(self._demand(), priority=work.answer.request.options.priority, client=client)
        self._waiting.was_accepted = self._waiting.was_placed = self._was_admitted = was_admitted
        self._seeking: asyncio.Task[Place] | None = None  # a place, in the queue
        self._attempts: list[Attempt] = []  # oldest first; two while work moves
        self._last: Attempt | None = None  # of those that have completed: its figures may still come
        self._retry: asyncio.TimerHandle | None = None
        self._change = asyncio.Event()

    async def run(self, proto: router_pb2.GenerateRequest) -> None:
        """Until the answer has ended, with a summary or a failure. Never raises OutriderErrors.

        `proto`: the request as it was sent, for the receipt. Here, so that it is freed with the work.
        """
        answer = self._answer
        try:
            while not (answer.is_complete or answer.has_ended):
                self._change.clear()
                self._settle()
                self._seek()
                await self._change.wait()
            if not answer.has_ended:
                await self._conclude()
        except OutriderError as error:
            answer.fail(error)
        finally:
            self._free()
            work = self._work
            if (receipts := self._services.receipts) is not None:
                receipts.keep(proto, answer, work.figures, work.served.info)

    def abort(self) -> bool:
        """Ends the unfinished samples, and stops the request everywhere. False: it had ended."""
        if self._answer.is_complete or self._answer.has_ended:
            return False
        self._answer.abort()
        self._work.figures.mark_end()
        self._free()
        self._change.set()
        return True

    def fail(self, error: OutriderError) -> None:
        """Ends the answer with this error, unless it has ended."""
        if not self._answer.is_complete:
            self._answer.fail(error)
            self._free()
            self._change.set()

    # ------------------------------------------------------------ the state of things

    def _settle(self) -> None:
        """Drops the attempts that have an outcome, and one of two where one is enough. Raises: OutriderError."""
        for attempt in tuple(self._attempts):
            if attempt.outcome is None:
                continue
            is_hedge = attempt is not self._attempts[0]
            self._attempts.remove(attempt)
            match attempt.outcome:
                case Completed():
                    self._last = attempt
                case Refused(rejected):
                    self._forget_hedge(attempt)
                    self._take_refusal(attempt, rejected)
                case Lost() as lost:
                    self._forget_hedge(attempt)
                    self._take_loss(attempt, lost, is_hedge=is_hedge)
                case Fatal(error):
                    raise error
        if len(self._attempts) == 2:
            older, newer = self._attempts
            if not (older.is_suspect or older.is_leaving):  # the node has recovered
                self._drop(newer)
            elif newer.has_tokens:
                self._drop(older)
                self._work.note_move(older.place.decode, "draining" if older.is_leaving else "decode_late")
            else:
                for attempt in self._attempts:  # a sample may have ended in the other one
                    attempt.cancel_ended_samples()

    def _take_refusal(self, attempt: Attempt, rejected: Rejected) -> None:
        """The request goes back to its turn in the queue, unless no node can ever take it."""
        is_admitted = self._was_admitted or self._work.figures.timeline.admitted_at is not None
        self._waiting.was_accepted |= is_admitted
        self._waiting.was_placed = is_admitted  # a place that came to nothing does not count
        match rejected.reason:
            case RejectReason.TOO_LARGE:
                self._excluded |= {attempt.incarnation}
                placement = self._services.placement
                if not self._attempts and not placement.usable_nodes(self._demand()):
                    if not placement.may_know_more:
                        raise InvalidRequestError(rejected.message, field="prompt", reason="TOO_LARGE")
                    if not is_admitted:  # what was admitted waits for a node that is as large as its first one
                        message = f"too large for the decode nodes that serve now: {rejected.message}"
                        raise PeerLostError(message, reason="NO_NODE")
            case RejectReason.INVALID:
                name = attempt.place.decode.name
                raise InternalError(f"decode node {name} calls the request invalid: {rejected.message}")

    def _take_loss(self, attempt: Attempt, lost: Lost, *, is_hedge: bool) -> None:
        """Raises: PeerLostError after too many of them without a new token."""
        losses = self._work.losses
        if lost.is_counted:
            losses.add_node(attempt.incarnation)
        if not self._attempts and (error := losses.final_error(lost.error)) is not None:
            raise error
        if not is_hedge:  # without a hedge the work goes on where it was
            self._waiting.was_accepted = True  # admitted before: it is not refused now
            self._work.note_move(attempt.place.decode, lost.cause, lost.error)

    def _seek(self) -> None:
        """Opens another attempt where one is needed, or asks for a place for it. Raises: OutriderError."""
        if self._seeking is not None:
            if not self._seeking.done():
                if not self._attempts and self._waiting.demand.numerics:  # nothing runs beside it any more
                    self._services.queue.change_demand(self._waiting, self._demand())
                return
            task, self._seeking = self._seeking, None
            if task.exception() is None:
                self._open(task.result())
            elif not self._attempts:
                task.result()
            else:  # what runs goes on where it is
                self._look_again_soon()
        elif not self._attempts:
            if self._last is not None:
                raise InternalError("a decode node says that all samples have ended, and some have not")
            self._seek_in_queue(self._demand())
        elif len(self._attempts) == 1:
            self._seek_beside(self._attempts[0])

    def _seek_beside(self, attempt: Attempt) -> None:
        """A second attempt where the first is late or its node drains, and both compute the same tokens."""
        is_in_doubt = attempt.is_leaving or attempt.is_suspect
        if not (is_in_doubt and self._answer.request.options.is_reproducible and attempt.has_exact_numerics):
            return
        demand = self._demand(besides=attempt)
        may_open = self._work.losses.may_open_beside_one() and self._services.placement.has_timely_decode_node(demand)
        if not may_open:
            self._look_again_soon()
        elif attempt.is_leaving:
            self._waiting.was_accepted = True
            self._seek_in_queue(demand)
        else:
            self._hedge(attempt, demand)

    def _seek_in_queue(self, demand: Demand) -> None:
        if demand != self._waiting.demand:  # an equal one has been hashed
            self._waiting.demand = demand
        waited = self._work.figures.timeline.begin(SpanKind.QUEUE)

        def end(_task: asyncio.Task[Place]) -> None:
            waited.close()
            self._change.set()

        self._seeking = asyncio.create_task(self._services.queue.wait_for_place(self._waiting), name="place")
        self._seeking.add_done_callback(end)

    def _hedge(self, suspect: Attempt, demand: Demand) -> None:
        """Opens a second attempt now, or looks again soon; never by way of the queue."""
        placement, late = self._services.placement, suspect.place.decode
        place = placement.place(demand, must_be_timely=True) if placement.may_hedge(late) else None
        if place is None:
            self._look_again_soon()
            return
        late.num_hedges += 1
        self._services.metrics.add_hedge()
        self._open(place)
        self._attempts[-1].hedged = late

    def _forget_hedge(self, attempt: Attempt) -> None:
        """It came to nothing: another one may be opened."""
        if attempt.hedged is not None and not attempt.has_tokens:
            attempt.hedged.num_hedges = max(attempt.hedged.num_hedges - 1, 0)

    def _look_again_soon(self) -> None:
        if self._retry is None:
            self._retry = asyncio.get_running_loop().call_later(HEDGE_RETRY_SECONDS, self._look_again)

    def _look_again(self) -> None:
        self._retry = None
        self._change.set()

    def _open(self, place: Place) -> None:
        fault_point("router.admitted")
        attempt = Attempt(self._work, place, self._demand(), on_change=self._change.set)
        self._attempts.append(attempt)
        attempt.start()

    def _demand(self, besides: Attempt | None = None) -> Demand:
        """The first unfinished sample's tokens: the KV of the others begins alike.

        `besides`: an attempt that goes on, so that the other one must compute the same tokens elsewhere.
        """
        request, samples = self._answer.request, self._answer.unfinished_samples()
        return Demand(
            request.prompt_token_ids + (samples[0].generated_token_ids if samples else ()),
            excluded=self._excluded if besides is None else self._excluded | {besides.incarnation},
            cache_salt=request.options.cache_salt,
            avoided=frozenset(self._work.losses.avoided),
            numerics="" if besides is None else besides.numerics,
            is_scored=self._answer.needs_prompt_logprobs,
            num_samples=max(len(samples), 1),
        )

    # ------------------------------------------------------------ the end

    def _drop(self, attempt: Attempt) -> None:
        self._attempts.remove(attempt)
        attempt.end()

    def _free(self) -> None:
        """Everything on nodes and in the queue. Idempotent."""
        for attempt in tuple(self._attempts):
            self._drop(attempt)
        if self._last is not None:
            self._last.end()
        if self._seeking is not None:
            task, self._seeking = self._seeking, None
            task.cancel()
            task.add_done_callback(_release_place)
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None

    async def _conclude(self) -> None:
        fault_point("router.before_finish")
        answer, figures = self._answer, self._work.figures
        figures.mark_end()
        last = self._last or next(iter(self._attempts), None)
        if last is not None:
            await last.wait_for_figures()
        answer.begin()
        ended = [sample.finished for sample in answer.samples if sample.finished]
        longest = max((sample.num_tokens for sample in answer.samples), default=0)
        summary = figures.finish(ended, num_generated_tokens=answer.num_generated_tokens, num_longest=longest)
        metrics = summary.metrics
        self._services.queue.observe_service(max(metrics.e2e_seconds - metrics.queue_seconds, 0.0))
        answer.close(summary)


def _release_place(task: asyncio.Task[Place]) -> None:
    """Of a place that was given out when it was no longer wanted."""
    if not task.cancelled() and task.exception() is None:
        task.result().release()
