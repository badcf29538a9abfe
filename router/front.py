"""What the router's public services are made on: open a request, read its answer, abort it. It knows no gRPC.

A service turns its own messages into `router_pb2.GenerateRequest`, our public one, and answers' events into its own;
so whatever a request can ask for, and whatever happens to it, is the same by every service.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Protocol

from outrider import __version__
from outrider.errors import PeerLostError
from outrider.model_hub.checkpoint_text import default_sampling
from outrider.node import ClusterStatus, Model
from outrider.request import VerificationMethod
from outrider.service.telemetry.tracing import NO_TRACER, Tracer
from outrider.v1 import router_pb2
from router.clients import Caller, Clients, Metadata
from router.live_request import LiveRequest
from router.node_directory import NodeDirectory, ServedModel
from router.registry import RequestRegistry
from router.request_figures import NOTHING_GENERATED, Trailers
from router.services import Services
from router.validation import check_request_id


class Call(Protocol):
    """What a service knows of a client's call, as gRPC's contexts name it."""

    def invocation_metadata(self) -> Metadata | None:
        """It says who calls."""

    def set_trailing_metadata(self, trailers: Trailers, /) -> object:
        """What is told when it ends."""


class Front:
    """Owned by the event loop. `services` gives what requests use; it raises PeerLostError until the router serves."""

    def __init__(
        self, nodes: NodeDirectory, services: Callable[[], Services], clients: Clients, tracer: Tracer = NO_TRACER
    ) -> None:
        self._nodes = nodes
        self._services = services
        self._clients = clients
        self._tracer = tracer
        self.requests = RequestRegistry(nodes, services, clients)

    # ------------------------------------------------------------ who calls

    def identify(self, call: Call) -> Caller:
        """Raises: UnauthenticatedError."""
        return self._clients.identify(call.invocation_metadata())

    def charge(self, call: Call) -> Caller:
        """Counts a call. Raises: UnauthenticatedError; CapacityError beyond the caller's rate."""
        caller = self.identify(call)
        self._clients.charge(caller)
        return caller

    # ------------------------------------------------------------ requests

    @asynccontextmanager
    async def open(self, proto: router_pb2.GenerateRequest, call: Call) -> AsyncIterator[LiveRequest]:
        """A new request, which the block reads with `LiveRequest.write`; without a resume window it ends with it.

        However the block ends, the trailers say what there was of an answer. Raises: OutriderError.
        """
        call.set_trailing_metadata(NOTHING_GENERATED)
        self._tracer.enter(call.invocation_metadata())
        live = await self.requests.open(proto, self.charge(call))
        with _reading(live, call):
            yield live

    @asynccontextmanager
    async def find(self, request_id: str, next_positions: Mapping[int, int], call: Call) -> AsyncIterator[LiveRequest]:
        """A request of the caller's that can be read again; as `open`. Raises: OutriderError."""
        self._tracer.enter(call.invocation_metadata())
        live = await self.requests.find(request_id, next_positions, self.charge(call))
        with _reading(live, call):
            yield live

    async def abort(self, request_id: str, call: Call) -> bool:
        """Whether there was something of the caller's to stop. Raises: OutriderError."""
        check_request_id(request_id)
        return await self.requests.abort(request_id, self.identify(call))

    # ------------------------------------------------------------ model and cluster

    def served(self) -> ServedModel:
        """Raises: PeerLostError while no node has served yet."""
        return self._nodes.model()

    def model(self) -> Model:
        """Raises: PeerLostError while no node has served yet."""
        info = self.served().info
        proposer, num_speculative_tokens = self._nodes.proposer()
        return Model(
            name=info.name,
            revision=info.revision,
            vocab_size=info.vocab_size,
            max_model_len=info.max_model_len,
            eos_token_ids=info.eos_token_ids,
            dtype=info.dtype,
            proposer=proposer,
            num_speculative_tokens=num_speculative_tokens,
            verification_method=VerificationMethod(self._services().config.verification_method),
            fingerprint=info.fingerprint,
            version=__version__,
            default_sampling=default_sampling(self.served().tokenizer_files),
        )

    def cluster_status(self) -> ClusterStatus:
        nodes = tuple(self._nodes.statuses())
        try:
            services = self._services()
        except PeerLostError:  # no node serves yet: nothing runs, nothing waits
            return ClusterStatus(nodes=nodes, num_requests_running=0, num_requests_waiting=0)
        queue = services.queue
        return ClusterStatus(
            nodes=nodes,
            num_requests_running=services.placement.num_placed,
            num_requests_waiting=queue.num_waiting,
            num_waiting_tokens=queue.num_waiting_tokens,
            oldest_wait_seconds=queue.oldest_wait_seconds(),
            num_moves=services.metrics.num_moves,
        )


@contextmanager
def _reading(live: LiveRequest, call: Call) -> Iterator[None]:
    try:
        yield
    finally:
        live.leave()
        call.set_trailing_metadata(live.trailers())
