"""The API behind the public services: opens requests, reads their answers, aborts them. It does not depend on gRPC.

Each service converts its own messages to the public `router_pb2.GenerateRequest`, and an answer's events to its own
messages, so that all services behave alike.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress

from outrider import __version__
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
from outrider.node import ClusterStatus, Model
from outrider.request import VerificationMethod
from outrider.service.telemetry.tracing import NO_TRACER, Tracer
from outrider.v1 import router_pb2
from outrider.wire.request import complete_proto
from router.api.clients import Call, Caller, Clients, split_key
from router.api.request_parsing import check_request, check_request_id, read_request, resume_window_seconds
from router.durability.keeper import AnswerReplicator, add_stored_tokens
from router.durability.store.base import StoredAnswer, StoredRequest
from router.nodes.adapters import ClusterAdapters
from router.nodes.directory import NodeDirectory, ServedModel
from router.observe.record import CLIENT_LEFT, RequestRecord
from router.observe.records import NOTHING_GENERATED
from router.observe.spans import SpanKind
from router.requests.answer import Answer, DeliveryBatcher
from router.requests.driver import EncodedRequest, RouterContext
from router.requests.live import LiveRequest
from router.requests.states import State

IDLE_CHECK_SECONDS = 0.02
"""Seconds between checks of whether a draining router is idle."""


_PUBLIC_INFO = ("name", "revision", "vocab_size", "max_model_len", "eos_token_ids", "dtype", "fingerprint", "weights")
"""Fields of a node's ModelInfo that clients see."""


class RequestRegistry:
    """The router's requests by key. Owned by the event loop.

    `context()` returns the context that requests share, or raises PeerLostError until the router serves.
    """

    def __init__(
        self, nodes: NodeDirectory, context: Callable[[], RouterContext], clients: Clients, tracer: Tracer = NO_TRACER
    ) -> None:
        self._nodes = nodes
        self._context = context
        self._clients = clients
        self._tracer = tracer
        self._by_key: dict[str, LiveRequest] = {}
        self._batcher = DeliveryBatcher()
        self.keeper: AnswerReplicator | None = None  # None: no shared store, so answers are lost with this router
        self.is_handing_over = False  # whether gateways' health checks fail while requests are still accepted
        self.is_draining = False

    def __len__(self) -> int:
        """The number of keys in use, including those of resumable answers that have ended."""
        return len(self._by_key)

    def __contains__(self, key: str) -> bool:
        return key in self._by_key

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being computed and no stream is attached."""
        return all(live.is_idle for live in self._by_key.values())

    # ------------------------------------------------------------ clients

    def identify(self, call: Call) -> Caller:
        """Returns the caller. Raises: UnauthenticatedError."""
        return self._clients.identify(call.invocation_metadata())

    def charge(self, call: Call) -> Caller:
        """Counts a call and returns its caller. Raises: UnauthenticatedError; CapacityError above the caller's rate."""
        caller = self.identify(call)
        self._clients.charge(caller)
        return caller

    # ------------------------------------------------------------ requests

    @asynccontextmanager
    async def open(self, proto: router_pb2.GenerateRequest, call: Call) -> AsyncIterator[LiveRequest]:
        """Opens a request, whose answer the block reads with `LiveRequest.write`.

        A request without a resume window ends with the block. However the block ends, the call's trailers describe the
        answer so far. Raises: OutriderError.
        """
        call.set_trailing_metadata(NOTHING_GENERATED)
        self._tracer.enter(call.invocation_metadata())
        with _reading(await self.begin(proto, self.identify(call)), call) as live:
            yield live

    @asynccontextmanager
    async def find(self, request_id: str, next_positions: Mapping[int, int], call: Call) -> AsyncIterator[LiveRequest]:
        """Finds the caller's resumable request, or takes it over from another router. The block reads it as in `open`.

        Raises: OutriderError.
        """
        self._tracer.enter(call.invocation_metadata())
        key = self.charge(call).key_of(request_id)
        with _reading(await self._find(key, request_id, next_positions), call) as live:
            yield live

    async def begin(self, proto: router_pb2.GenerateRequest, caller: Caller) -> LiveRequest:
        """Charges the caller and starts a request.

        A resumable request is in the shared store when this method returns, if there is such a store and it answers.

        Raises: OutriderError.
        """
        with self.counting_refusals():
            self._clients.charge(caller)
            self._check_serving()
            info = self._nodes.model().info
            check_request(proto, info, self.adapters.by_name_for(proto.model, proto.adapter_fingerprint))
            caller.check_priority(proto.priority)
            live = await self._begin(proto.request_id or str(uuid.uuid4()), proto, caller)
        if live.window_seconds is None or self.keeper is None:
            return live
        try:  # stored while the prompt is computed; the client has not received Started yet
            stored = StoredRequest(
                request_id=live.key,
                fingerprint=info.fingerprint,
                resume_window_seconds=live.window_seconds,
                start_position=live.answer.samples[0].start_position,
                request=complete_proto(proto, live.answer.request).SerializeToString(),
                numerics=self._nodes.exact_numerics() if live.answer.request.options.is_reproducible else "",
            )
            live.is_durable = await self.keeper.keep(live, stored)
        except BaseException as error:
            live.close(error if isinstance(error, OutriderError) else None)
            raise
        return live

    async def _find(self, key: str, request_id: str, next_positions: Mapping[int, int]) -> LiveRequest:
        live, is_claiming = self._by_key.get(key), self.keeper is not None and self.keeper.is_claiming(key)
        if live is not None and live.state is State.ENCODING and not is_claiming:
            raise NotFoundError(f"request {request_id!r} is still being encoded", reason="NOT_RESUMABLE")
        if live is not None and not is_claiming:
            if live.window_seconds is None:
                raise NotFoundError(f"request {request_id!r} has no resume window", reason="NOT_RESUMABLE")
            is_ours = await self._is_ours(key)
            if self._by_key.get(key) is not live:  # the window has ended, or another call has taken it over again
                return await self._find(key, request_id, next_positions)
            if is_ours:
                return live
            live.close(AbortedError("another router has taken the request over", reason=RESUMED_ELSEWHERE))
        self._check_serving()  # a draining router cannot tell whether another router has the request
        if self.keeper is not None and not self.keeper.is_claiming(key):
            self._check_known(request_id, await self.keeper.store.read(key), next_positions)
            if key in self._by_key:
                return await self._find(key, request_id, next_positions)
        fingerprint = self._nodes.model().info.fingerprint
        if self.keeper is None:
            raise NotFoundError(f"request {request_id!r} is neither running nor resumable", reason="REQUEST_NOT_FOUND")
        return await self.keeper.resume(key, fingerprint=fingerprint)

    async def _is_ours(self, key: str) -> bool:
        """Returns whether no other router has taken the request over. One that has may have newer, different tokens."""
        if self.keeper is None:
            return True
        try:
            stored = await self.keeper.store.read(key)
        except StoreError:
            return True
        return stored is None or stored.is_ours

    def _check_known(self, request_id: str, stored: StoredAnswer | None, next_positions: Mapping[int, int]) -> None:
        """Checks the client's positions before the request is claimed from a router that may have all its tokens.

        Raises: NotFoundError if the client has tokens that are not stored and could be recomputed differently.
        """
        if stored is None or self._is_exact(stored):
            return
        output = router_pb2.GenerateRequest.FromString(stored.request.request).output
        known = {} if output.HasField("top_logprobs") else stored.token_ids  # logprobs are not stored
        start = stored.request.start_position
        if any(position > start + len(known.get(sample, ())) for sample, position in next_positions.items()):
            raise NotFoundError(
                f"request {request_id!r} cannot be continued: the client has tokens that are not stored and could not "
                "be recomputed identically",
                reason="NOT_REPRODUCIBLE",
            )

    def _is_exact(self, stored: StoredAnswer) -> bool:
        """Returns whether the nodes' numerics are exact and the same as when the request began."""
        numerics = stored.request.numerics
        return bool(numerics) and numerics == self._nodes.exact_numerics()

    async def abort(self, request_id: str, call: Call) -> bool:
        """Aborts the caller's request. Returns whether it was running, here or on another router.

        Aborting here is never refused, since it frees resources. A call that stops nothing here counts against the
        caller's rate.
        Raises: InvalidRequestError, UnauthenticatedError, StoreError; CapacityError above the caller's rate.
        """
        check_request_id(request_id)
        caller = self.identify(call)
        key = caller.key_of(request_id)
        live = self._by_key.get(key)
        if live is not None and live.state is State.ENCODING:
            live = None
        was_running = live is not None and live.abort()
        if not was_running:
            self._clients.charge(caller)
        if self.keeper is None:
            return was_running
        if live is None:
            return await self.keeper.store.request_abort(key)
        with suppress(StoreError):  # another router may have taken the request over meanwhile
            await self.keeper.store.request_abort(key)
        return was_running

    async def restore(self, stored: StoredAnswer) -> LiveRequest:
        """Continues another router's request after its stored tokens. Raises: OutriderError."""
        proto = router_pb2.GenerateRequest.FromString(stored.request.request)
        name, request_id = split_key(stored.request.request_id)
        with self.counting_refusals():
            live = await self._begin(request_id, proto, self._clients.named(name), stored=stored)
        if stored.is_aborted:
            live.abort()
        return live

    @contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """Counts an error in the block as a failed request. Requests that have started are counted when they end.

        A router counts nothing before its first node serves.
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
        """Counts the failure of a request that never started."""
        with suppress(PeerLostError):  # no node has served yet
            self._context().metrics.add_failures(reason, 1)

    # ------------------------------------------------------------ model and cluster

    def served(self) -> ServedModel:
        """Returns the served model. Raises: PeerLostError while no node has served yet."""
        return self._nodes.model()

    def model(self) -> Model:
        """Returns the public description of the model. Raises: PeerLostError while no node has served yet."""
        served = self.served()
        info = served.info
        proposer, num_speculative_tokens = self._nodes.proposer()
        return Model(
            **{name: getattr(info, name) for name in _PUBLIC_INFO},
            proposer=proposer,
            num_speculative_tokens=num_speculative_tokens,
            verification_method=VerificationMethod(self._context().config.verification_method),
            version=__version__,
            default_sampling=served.default_sampling,
            adapters=tuple(adapter for _, adapter in sorted(self.adapters.by_name.items())),
        )

    @property
    def adapters(self) -> ClusterAdapters:
        return self._nodes.adapters

    def cluster_status(self) -> ClusterStatus:
        nodes = tuple(self._nodes.statuses())
        try:
            context = self._context()
        except PeerLostError:  # no node serves yet, so nothing runs or waits
            return ClusterStatus(nodes=nodes, num_requests_running=0, num_requests_waiting=0)
        queue = context.queue
        return ClusterStatus(
            nodes=nodes,
            num_requests_running=context.placement.num_placed,
            num_requests_waiting=queue.num_waiting,
            num_waiting_tokens=queue.num_waiting_tokens,
            oldest_wait_seconds=queue.oldest_wait_seconds(),
            num_moves=context.metrics.num_moves,
        )

    # ------------------------------------------------------------ shutdown

    def fail_all(self, error: OutriderError) -> None:
        """Fails every running request with this error."""
        for live in tuple(self._by_key.values()):
            live.fail(error)

    def close_all(self, error: OutriderError) -> None:
        """Drops every answer; unfinished ones end with this error."""
        for live in tuple(self._by_key.values()):
            live.close(error)

    async def wait_until_idle(self) -> None:
        while not self.is_idle:  # noqa: ASYNC110 only while the router drains
            await asyncio.sleep(IDLE_CHECK_SECONDS)

    def _check_serving(self) -> None:
        if self.is_draining:
            raise PeerLostError("the router is draining", reason="DRAINING")

    # ------------------------------------------------------------ start of a request

    async def _begin(
        self, request_id: str, proto: router_pb2.GenerateRequest, caller: Caller, *, stored: StoredAnswer | None = None
    ) -> LiveRequest:
        """Encodes and starts the request. `stored`: the state that another router stored. Raises: OutriderError."""
        context, key = self._context(), caller.key_of(request_id)
        if key in self:
            raise AlreadyRunningError(
                f"request id {request_id!r} is in use by another request", reason="DUPLICATE_REQUEST_ID"
            )
        window_seconds = resume_window_seconds(proto)
        live = LiveRequest(key, context, window_seconds=window_seconds, on_change=self._take_change)
        self._by_key[key] = live
        try:
            with context.records.beginning(request_id, context.metrics) as record:
                live.start(await self._encode(request_id, proto, caller, record, stored))
        except BaseException as error:
            live.close(error if isinstance(error, OutriderError) else None)
            raise
        return live

    async def _encode(
        self,
        request_id: str,
        proto: router_pb2.GenerateRequest,
        caller: Caller,
        record: RequestRecord,
        stored: StoredAnswer | None,
    ) -> EncodedRequest:
        context, served = self._context(), self._nodes.model()
        encoding = record.begin_span(SpanKind.ENCODE)
        method = VerificationMethod(context.config.verification_method)
        adapters = self.adapters.by_name_for(proto.model, proto.adapter_fingerprint)
        request = await read_request(
            proto, served, caller, request_id=request_id, adapters=adapters, default_method=method
        )
        adapter = request.options.adapter
        encoding.close()
        if stored is None or caller.key_of(request_id) not in self:  # this is no takeover, or it was closed meanwhile
            self._check_serving()
        started = Started(
            request_id=request.request_id,
            num_prompt_tokens=len(request.prompt_token_ids),
            seed=request.options.sampling.seed,
            model=adapter.name if adapter else served.info.name,
            router=context.router_address,
            adapter_fingerprint=adapter.fingerprint if adapter else "",
        )
        answer = Answer(request, started, tokenizer=served.tokenizer, batcher=self._batcher)
        if stored is not None:
            add_stored_tokens(answer, stored)
            answer.may_lag_client = self._is_exact(stored)
        record.take_request(request, model=started.model, num_generated_tokens=answer.num_generated_tokens)
        return EncodedRequest(
            answer=answer,
            record=record,
            account=context.answers.open(request, num_known_tokens=answer.num_generated_tokens),
            proto=proto,
            model=served.info,
            client=caller.share,
            was_admitted=stored is not None,
        )

    def _take_change(self, live: LiveRequest) -> None:
        if self.keeper is not None:
            self.keeper.wake(live.key)
        if live.is_closed and self._by_key.get(live.key) is live:
            del self._by_key[live.key]


@contextmanager
def _reading(live: LiveRequest, call: Call) -> Iterator[LiveRequest]:
    try:
        yield live
    finally:
        live.leave()
        call.set_trailing_metadata(live.trailers())
