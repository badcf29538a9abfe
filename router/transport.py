"""What the router asks of a node, over gRPC."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc
import grpc.aio

from outrider.errors import NotFoundError, PeerLostError
from outrider.node import NodeInfo, NodeReport
from outrider.prefill import PrefillCall, PrefillFigures
from outrider.protocol_versions import SUPPORTED_VERSIONS
from outrider.rpc.peer_security import PeerSecurity
from outrider.rpc.status import from_rpc_error
from outrider.service.liveness import REPORT_SECONDS
from outrider.service.telemetry.tracing import TRACEPARENT
from outrider.v1 import node_pb2, node_pb2_grpc, prefill_pb2_grpc, session_pb2, session_pb2_grpc
from outrider.wire.node import REPORT, info_from_proto
from outrider.wire.prefill import CALL, figures_from_proto

MAX_TOKENIZER_BYTES = 256 << 20
TOKENIZER_SECONDS = 60.0

SessionCall = grpc.aio.StreamStreamCall[session_pb2.SessionCommand, session_pb2.SessionReport]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterIdentity:
    """How this router introduces itself to decode nodes."""

    name: str
    incarnation: bytes  # 16 random bytes, from the start of the process

    def hello(self, *, fingerprint: str, reached_at: str) -> session_pb2.SessionHello:
        """The first message of a session. `fingerprint`: of the model; `reached_at`: the node's address."""
        return session_pb2.SessionHello(
            protocol_version=SUPPORTED_VERSIONS.newest,
            oldest_protocol_version=SUPPORTED_VERSIONS.oldest,
            incarnation=self.incarnation,
            name=self.name,
            fingerprint=fingerprint,
            reached_at=reached_at,
        )


class NodeTransport:
    """Owns the channel to one address. Every method raises nothing but OutriderErrors."""

    def __init__(self, security: PeerSecurity, *, address: str) -> None:
        self._security = security
        self._address = address
        self._open_channel()

    def _open_channel(self) -> None:
        self._security_version = self._security.version
        self._channel = channel = self._security.open_channel(self._address)
        self._node = node_pb2_grpc.NodeServiceStub(channel)
        self._decode = session_pb2_grpc.DecodeServiceStub(channel)
        self._prefill = prefill_pb2_grpc.PrefillServiceStub(channel)

    async def identify(self, *, timeout_seconds: float) -> NodeInfo:
        """The first call of a connection: nothing else runs on the channel, and renewed certificates are shown."""
        if self._security.version != self._security_version:
            old = self._channel
            self._open_channel()
            await old.close()
        with self._errors():
            return info_from_proto(await self._node.GetNode(node_pb2.GetNodeRequest(), timeout=timeout_seconds))

    async def tokenizer_files(self) -> dict[str, bytes]:
        files: dict[str, bytearray] = {}
        num_bytes = 0
        call = self._node.GetTokenizer(node_pb2.GetTokenizerRequest(), timeout=TOKENIZER_SECONDS)
        try:
            with self._errors():
                async for chunk in call:
                    num_bytes += len(chunk.data)
                    if num_bytes > MAX_TOKENIZER_BYTES:
                        raise self._lost("sends a tokenizer without end")
                    files.setdefault(chunk.file_name, bytearray()).extend(chunk.data)
        finally:
            call.cancel()
        return {name: bytes(data) for name, data in files.items()}

    async def reports(self, *, incarnation: bytes) -> AsyncGenerator[NodeReport, None]:
        """The reports of this process, until it is lost. Raises: PeerLostError."""
        call = self._node.Watch(node_pb2.WatchNodeRequest(interval_milliseconds=round(REPORT_SECONDS * 1e3)))
        try:
            with self._errors():
                async for proto in call:
                    report = REPORT.from_proto(proto)
                    if report.incarnation != incarnation:
                        raise self._lost("was restarted")
                    yield report
            raise self._lost("ended its reports")
        finally:
            call.cancel()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Raises nothing but OutriderErrors."""
        try:
            yield
        except grpc.RpcError as error:
            found = from_rpc_error(error, target=self._address)
            if isinstance(found, (NotFoundError, PeerLostError)):
                raise found from error
            message = f"{self._address}: {found.message}"
            raise PeerLostError(message, node=self._address, reason=found.reason) from error
        except ValueError as error:
            raise PeerLostError(f"{self._address}: {error}", node=self._address) from error

    def _lost(self, what: str) -> PeerLostError:
        return PeerLostError(f"{self._address} {what}", node=self._address)

    def open_session(self) -> SessionCall:
        """Of a decode node. The caller says hello first (`router.sessions.DecodeSession`)."""
        call: SessionCall = self._decode.Session()
        return call

    async def prefill(self, call: PrefillCall) -> PrefillFigures:
        """Has a prefill node compute and push. Cancelling stops both."""
        metadata = ((TRACEPARENT, call.traceparent),) if call.traceparent else None
        try:
            return figures_from_proto(await self._prefill.Prefill(CALL.to_proto(call), metadata=metadata))
        except grpc.RpcError as error:
            raise from_rpc_error(error, target=self._address) from error

    async def close(self) -> None:
        await self._channel.close()
