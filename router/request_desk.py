"""Where requests come in: checked, named, encoded, begun; found again by those who come back."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress

from outrider.errors import NotFoundError, PeerLostError, StoreError
from outrider.request import Request, VerificationMethod
from outrider.v1 import router_pb2
from router.answer import Answer, make_answer
from router.answer_keeper import Keeper, NoKeeper, stored_request, take_known_tokens
from router.answer_reader import NewsBoard
from router.caller import Caller, split_key
from router.clients import Clients
from router.intake import complete_proto, read_request, resume_window_seconds
from router.node_directory import NodeDirectory, ServedModel
from router.request_flow import FlowServices, RequestFlow
from router.request_record import RequestRecord
from router.running_requests import RunningRequest, RunningRequests
from router.store.base import StoredAnswer
from router.trailers import answer_trailers
from router.validation import check_request


class RequestDesk:
    """Owned by the event loop. `services` raises PeerLostError until the router serves."""

    def __init__(self, nodes: NodeDirectory, services: Callable[[], FlowServices], clients: Clients) -> None:
        self._nodes = nodes
        self._clients = clients
        self._services = services
        self.running = RunningRequests()
        self.keeper: Keeper = NoKeeper()
        self._board = NewsBoard()
        self.is_draining = False

    async def open(self, proto: router_pb2.GenerateRequest, caller: Caller, *, address: str = "") -> RunningRequest:
        """Begins a request; one with a resume window is in the store when this returns.

        `address`: of a caller without a name. Raises: OutriderError.
        """
        arrived_at = time.monotonic()
        if self.is_draining:
            raise PeerLostError("the router is draining", reason="DRAINING")
        services, served = self._services(), self._nodes.model()
        # Two kinds: a client may call itself by the address of another one.
        departs_as = f"name {caller.share}" if caller.share else f"address {address}"
        services.departures.check(departs_as)
        check_request(proto, served.info)
        caller.check_priority(proto.priority)
        request_id = proto.request_id or str(uuid.uuid4())
        running = self.running.enter(caller.key_of(request_id))
        services.departures.begin(departs_as)
        running.on_close(lambda: services.departures.end(departs_as))
        try:
            default_method = VerificationMethod(services.config.verification_method)
            request = await read_request(proto, served, caller, request_id=request_id, default_method=default_method)
            window = resume_window_seconds(proto)
            answer = self._make_answer(request, served)
            _begin(
                running,
                answer,
                served,
                services,
                arrived_at=arrived_at,
                window=window,
                client=caller.share,
                departs_as=departs_as,
            )
            if window is not None:  # while the prompt is being computed; nobody has been told of the request yet
                fingerprint = served.info.fingerprint
                message = complete_proto(proto, request).SerializeToString()
                numerics = self._nodes.exact_numerics() if request.is_reproducible else ""
                stored = stored_request(
                    running.key, request, message, fingerprint=fingerprint, window=window, numerics=numerics
                )
                running.is_kept = await self.keeper.keep(running, answer, stored)
        except StoreError as error:
            running.fail(error)
            running.close()
            raise
        except BaseException:
            running.close()
            raise
        return running

    async def find(self, request_id: str, next_positions: Mapping[int, int], caller: Caller) -> RunningRequest:
        """The caller's request whose answer can be read again, here or from a router that is gone.

        Raises: OutriderError.
        """
        key = caller.key_of(request_id)
        if self.keeper.is_claiming(key):
            return await self.keeper.resume(key, fingerprint=self._nodes.model().info.fingerprint)
        if self.running.has(key):
            return self.running.find_resumable(key)
        if self.is_draining:  # which says nothing of whether another router has it
            raise PeerLostError("the router is draining", reason="DRAINING")
        running = await self.keeper.resume(key, fingerprint=self._nodes.model().info.fingerprint)
        samples = running.answer.samples
        is_behind = any(
            index < len(samples) and position > samples[index].next_position
            for index, position in next_positions.items()
        )
        if is_behind and not running.answer.may_be_behind:
            # Tokens that are not known here would be computed again, and differ from those that the client has.
            running.close()
            raise NotFoundError(f"request {request_id!r} cannot go on here", reason="NOT_REPRODUCIBLE")
        return running

    async def abort(self, request_id: str, caller: Caller) -> bool:
        """Whether there was something of the caller's to stop, here or on another router.

        What frees is never refused; a call that stops nothing here is charged like others.
        Raises: StoreError; CapacityError beyond the caller's rate.
        """
        key = caller.key_of(request_id)
        was_running = self.running.abort(key)
        if not was_running:
            self._clients.charge(caller)
        if not self.running.has(key):
            return await self.keeper.abort(key)
        with suppress(StoreError):  # which another router may have taken over meanwhile
            await self.keeper.abort(key)
        return was_running

    async def restore(self, stored: StoredAnswer) -> RunningRequest:
        """Goes on with another router's request, from the tokens that are known of it. Raises: OutriderError."""
        services, served = self._services(), self._nodes.model()
        proto = router_pb2.GenerateRequest.FromString(stored.request.request)
        name, request_id = split_key(stored.request.request_id)
        caller = self._clients.named(name)
        running = self.running.enter(stored.request.request_id)
        try:
            request = await read_request(proto, served, caller, request_id=request_id)
            answer = self._make_answer(request, served)
            take_known_tokens(answer, stored)
            numerics = stored.request.numerics
            answer.may_be_behind = bool(numerics) and numerics == self._nodes.exact_numerics()
            window = stored.request.resume_window_seconds
            _begin(
                running,
                answer,
                served,
                services,
                arrived_at=time.monotonic(),
                window=window,
                client=caller.share,
                was_admitted=True,
            )
            if stored.is_aborted:
                running.abort()
        except BaseException:
            running.close()
            raise
        return running

    def _make_answer(self, request: Request, served: ServedModel) -> Answer:
        stop_token_ids = _stop_token_ids(request, served)
        return make_answer(request, tokenizer=served.tokenizer, stop_token_ids=stop_token_ids, board=self._board)


def _stop_token_ids(request: Request, served: ServedModel) -> tuple[int, ...]:
    eos_token_ids = () if request.stop.ignore_eos else served.info.eos_token_ids
    return tuple(sorted({*eos_token_ids, *request.stop.token_ids}))


def _begin(
    running: RunningRequest,
    answer: Answer,
    served: ServedModel,
    services: FlowServices,
    *,
    arrived_at: float,
    window: float | None,
    client: str = "",
    departs_as: str | None = None,
    was_admitted: bool = False,
) -> None:
    """Starts to compute the answer. `departs_as`: whose departure it is if nobody waits for its end; None: nobody's.

    Raises: CapacityError when there is no memory for it, InvalidRequestError.
    """
    request = answer.request
    account = services.answers.open(request, running)
    record = RequestRecord(request, arrived_at)
    stop_token_ids = _stop_token_ids(request, served)

    def settle() -> None:
        """What fails, and what nodes have not worked on, counts for nothing."""
        if departs_as is not None and record.admitted_at is not None and answer.failure is None:
            services.departures.settle(departs_as, was_left=not answer.is_whole)

    running.on_close(account.close)
    running.on_close(settle)
    running.begin(
        answer,
        RequestFlow(
            answer,
            record,
            served,
            services,
            account=account,
            stop_token_ids=stop_token_ids,
            client=client,
            was_admitted=was_admitted,
        ),
        trailers=lambda: answer_trailers(
            record,
            num_generated_tokens=answer.num_generated_tokens,
            method=request.verification_method,
            is_kept=running.is_kept,
        ),
        resume_window_seconds=window,
    )
