"""Requests by name: created, found, aborted and restored, for every service (`front.py`). It knows no gRPC."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

from outrider.answer import Started
from outrider.errors import (
    RESUMED_ELSEWHERE,
    AbortedError,
    AlreadyRunningError,
    NotFoundError,
    OutriderError,
    PeerLostError,
    StoreError,
)
from outrider.request import VerificationMethod
from outrider.v1 import router_pb2
from router.answer import make_answer
from router.answer_keeper import AnswerKeeper, take_known_tokens
from router.answer_reader import DeliveryBatcher
from router.clients import Caller, Clients, split_key
from router.live_request import LiveRequest
from router.losses import Losses
from router.node_directory import NodeDirectory
from router.request_figures import CLIENT_LEFT, RequestFigures
from router.request_flow import RequestFlow
from router.request_parsing import complete_proto, read_request, resume_window_seconds
from router.store.base import StoredAnswer, StoredRequest
from router.timeline import SpanKind
from router.trace_spans import request_attributes
from router.validation import check_request
from router.work import Services, Work


class RequestRegistry:
    """Owned by the event loop. `services` raises PeerLostError until the router serves."""

    def __init__(self, nodes: NodeDirectory, services: Callable[[], Services], clients: Clients) -> None:
        self._nodes = nodes
        self._clients = clients
        self._services = services
        self._by_key: dict[str, LiveRequest] = {}
        self._beginning: set[str] = set()  # names of requests that are being encoded
        self._busy: set[LiveRequest] = set()  # those that are not idle
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._batcher = DeliveryBatcher()
        self.keeper: AnswerKeeper | None = None  # None: no shared store, an answer lives and dies with this router
        self.is_leaving = False  # new requests are taken still, and gateways told to send them elsewhere
        self.is_draining = False

    def __len__(self) -> int:
        """Names in use: resumable answers that have ended count."""
        return len(self._by_key) + len(self._beginning)

    def __contains__(self, key: str) -> bool:
        return key in self._by_key or key in self._beginning

    # ------------------------------------------------------------ what fronts ask

    async def open(self, proto: router_pb2.GenerateRequest, caller: Caller) -> LiveRequest:
        """Charges the caller and begins a request; one with a resume window is in the store when this returns.

        Raises: OutriderError.
        """
        with self.refusals_counted():
            self._clients.charge(caller)
            self._check_serving()
            services, info = self._services(), self._nodes.model().info
            check_request(proto, info)
            caller.check_priority(proto.priority)
            request_id = proto.request_id or str(uuid.uuid4())
            key, window = caller.key_of(request_id), resume_window_seconds(proto)
            live = await self._begin(services, key, request_id, proto, caller, window=window)
        if window is None or self.keeper is None:
            return live
        try:  # while the prompt is being computed; nobody has been told of the request yet
            stored = StoredRequest(
                request_id=key,
                fingerprint=info.fingerprint,
                resume_window_seconds=window,
                start_position=live.answer.samples[0].start_position,
                request=complete_proto(proto, live.answer.request).SerializeToString(),
                numerics=self._nodes.exact_numerics() if live.answer.request.options.is_reproducible else "",
            )
            live.is_kept = await self.keeper.keep(live, stored)
        except BaseException as error:
            live.close(error if isinstance(error, OutriderError) else None)
            raise
        return live

    async def find(self, request_id: str, next_positions: Mapping[int, int], caller: Caller) -> LiveRequest:
        """The caller's request whose answer can be read again, here or from a router that is gone.

        Raises: OutriderError.
        """
        key = caller.key_of(request_id)
        if key in self._beginning and not self._is_claiming(key):
            raise NotFoundError(f"request {request_id!r} is being encoded", reason="NOT_RESUMABLE")
        live = self._by_key.get(key)
        if live is not None and not self._is_claiming(key):
            if live.window_seconds is None:
                raise NotFoundError(f"request {request_id!r} has no resume window", reason="NOT_RESUMABLE")
            is_ours = await self._is_ours(key)
            if self._by_key.get(key) is not live:  # its window has ended, or another call has brought it back
                return await self.find(request_id, next_positions, caller)
            if is_ours:
                return live
            live.close(AbortedError("another router has taken the request over", reason=RESUMED_ELSEWHERE))
        self._check_serving()  # a router that drains cannot tell whether another one has it
        if self.keeper is not None and not self.keeper.is_claiming(key):
            self._check_known(request_id, await self.keeper.read(key), next_positions)
            if key in self._by_key:
                return await self.find(request_id, next_positions, caller)
        fingerprint = self._nodes.model().info.fingerprint
        if self.keeper is None:
            raise NotFoundError(f"no request {key!r} is running or resumable here", reason="REQUEST_NOT_FOUND")
        return await self.keeper.resume(key, fingerprint=fingerprint)

    def _is_claiming(self, key: str) -> bool:
        return self.keeper is not None and self.keeper.is_claiming(key)

    async def _is_ours(self, key: str) -> bool:
        """Whether no other router has taken the request over: its tokens there may be newer, and differ."""
        if self.keeper is None:
            return True
        try:
            stored = await self.keeper.read(key)
        except StoreError:
            return True
        return stored is None or stored.is_ours

    def _check_known(self, request_id: str, stored: StoredAnswer | None, next_positions: Mapping[int, int]) -> None:
        """Before the request is claimed from a router that may have all its tokens.

        Raises: NotFoundError when tokens that are not known here would be computed again, and could differ from
        those that the client has.
        """
        if stored is None or self._is_exact(stored):
            return
        output = router_pb2.GenerateRequest.FromString(stored.request.request).output
        known = {} if output.HasField("top_logprobs") else stored.token_ids  # logprobs are not stored
        start = stored.request.start_position
        if any(position > start + len(known.get(sample, ())) for sample, position in next_positions.items()):
            raise NotFoundError(f"request {request_id!r} cannot go on here", reason="NOT_REPRODUCIBLE")

    def _is_exact(self, stored: StoredAnswer) -> bool:
        """Whether all nodes compute what they computed when the request began."""
        numerics = stored.request.numerics
        return bool(numerics) and numerics == self._nodes.exact_numerics()

    async def abort(self, request_id: str, caller: Caller) -> bool:
        """Whether there was something of the caller's to stop, here or on another router.

        What frees is never refused; a call that stops nothing here is charged like others.
        Raises: StoreError; CapacityError beyond the caller's rate.
        """
        key = caller.key_of(request_id)
        live = self._by_key.get(key)
        was_running = live is not None and live.abort()
        if not was_running:
            self._clients.charge(caller)
        if self.keeper is None:
            return was_running
        if live is None:
            return await self.keeper.abort(key)
        with suppress(StoreError):  # which another router may have taken over meanwhile
            await self.keeper.abort(key)
        return was_running

    async def restore(self, stored: StoredAnswer) -> LiveRequest:
        """Goes on with another router's request, from the tokens that are known of it. Raises: OutriderError."""
        proto = router_pb2.GenerateRequest.FromString(stored.request.request)
        services, key, window = self._services(), stored.request.request_id, stored.request.resume_window_seconds
        name, request_id = split_key(key)
        caller = self._clients.named(name)
        with self.refusals_counted():
            live = await self._begin(services, key, request_id, proto, caller, window=window, stored=stored)
        if stored.is_aborted:
            live.abort()
        return live

    @contextmanager
    def refusals_counted(self) -> Iterator[None]:
        """Around all that comes before a request lives: what the block raises counts as a request that failed.

        Those that live are counted at their end. A router counts nothing before its first node serves.
        """
        try:
            yield
        except OutriderError as error:
            self.count_failure(error.reason)
            raise
        except asyncio.CancelledError:
            self.count_failure(CLIENT_LEFT)
            raise

    def count_failure(self, reason: str) -> None:
        """Of a request that did not live."""
        with suppress(PeerLostError):  # no node has served yet
            self._services().metrics.add_failures(reason, 1)

    # ------------------------------------------------------------ the router's end

    def fail_all(self, error: OutriderError) -> None:
        """Every request that runs ends with this error."""
        for live in tuple(self._by_key.values()):
            live.fail(error)

    def close_all(self, error: OutriderError) -> None:
        """Drops every answer; those that have not ended end with this error."""
        for live in tuple(self._by_key.values()):
            live.close(error)

    async def wait_until_idle(self) -> None:
        """Until nothing is computed and no stream is attached."""
        await self._is_idle.wait()

    def _check_serving(self) -> None:
        if self.is_draining:
            raise PeerLostError("the router is draining", reason="DRAINING")

    # ------------------------------------------------------------ a request's beginning

    @contextmanager
    def _name(self, key: str) -> Iterator[None]:
        """Takes the name; it is free again afterwards unless the request lives. Raises: AlreadyRunningError."""
        if key in self:
            raise AlreadyRunningError(f"request {key!r} is running", reason="DUPLICATE_REQUEST_ID")
        self._beginning.add(key)
        self._is_idle.clear()
        try:
            yield
        finally:
            self._beginning.discard(key)
            self._note_idle()

    async def _begin(
        self,
        services: Services,
        key: str,
        request_id: str,
        proto: router_pb2.GenerateRequest,
        caller: Caller,
        *,
        window: float | None,
        stored: StoredAnswer | None = None,
    ) -> LiveRequest:
        """Encodes the request, and starts it. `stored`: another router has begun it. Raises: OutriderError."""
        served = self._nodes.model()
        method = VerificationMethod(services.config.verification_method)
        with self._name(key), services.timelines.beginning(request_id) as timeline:
            encoding = timeline.begin(SpanKind.ENCODE)
            request = await read_request(proto, served, caller, request_id=request_id, default_method=method)
            encoding.close()
            if stored is None:
                self._check_serving()
            started = Started(
                request_id=request.request_id,
                num_prompt_tokens=len(request.prompt_token_ids),
                seed=request.options.sampling.seed,
                model=served.info.name,
                router=services.router_address,
            )
            answer = make_answer(request, tokenizer=served.tokenizer, started=started, batcher=self._batcher)
            if stored is not None:
                take_known_tokens(answer, stored)
                answer.may_be_behind = self._is_exact(stored)
            timeline.num_prompt_tokens, timeline.num_samples = started.num_prompt_tokens, request.options.sampling.n
            if timeline.traced.is_recording():
                timeline.traced.set_attributes(request_attributes(request, model=served.info.name))
            figures = RequestFigures(request, services.metrics, timeline)

            def end(error: OutriderError | None) -> None:
                figures.close(error)
                services.timelines.end(timeline, error)

            live = LiveRequest(key, answer, figures, window_seconds=window, on_change=self._take_change, on_end=end)
            work = Work(
                answer=answer,
                figures=figures,
                account=services.answers.open(
                    request,
                    num_made_tokens=answer.num_generated_tokens,
                    is_idle=lambda: live.is_idle,
                    give_up=live.give_up,
                ),
                losses=Losses(answer),
                served=served,
                services=services,
            )
            self._by_key[key] = live
            live.start(work.account, RequestFlow(work, client=caller.share, was_admitted=stored is not None), proto)
            self._take_change(live)
            return live

    def _take_change(self, live: LiveRequest) -> None:
        if self.keeper is not None:
            self.keeper.wake(live.key)
        if live.is_closed and self._by_key.get(live.key) is live:
            del self._by_key[live.key]
        if live.is_idle:
            self._busy.discard(live)
        else:
            self._busy.add(live)
        self._note_idle()

    def _note_idle(self) -> None:
        if self._busy or self._beginning:
            self._is_idle.clear()
        else:
            self._is_idle.set()
