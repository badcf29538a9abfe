"""What the router asks of a node, over gRPC."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc
import grpc.aio

from outrider.errors import InvalidRequestError, MismatchError, NotFoundError, OutriderError, PeerLostError
from outrider.node import NodeInfo, NodeReport
from outrider.prefill import PrefillCall, PrefillFigures
from outrider.protocol_versions import SUPPORTED_VERSIONS
from outrider.rpc.status import from_rpc_error
from outrider.rpc.tls import PeerSecurity
from outrider.service.liveness import REPORT_SECONDS
from outrider.service.telemetry.tracing import TRACEPARENT
from outrider.session import SequenceGroupCommand, SequenceGroupEvent
from outrider.v1 import node_pb2, node_pb2_grpc, prefill_pb2_grpc, session_pb2, session_pb2_grpc
from outrider.wire.node import REPORT, info_from_proto
from outrider.wire.prefill import CALL, figures_from_proto
from outrider.wire.session import command_to_proto, report_message_from_proto

MAX_TOKENIZER_BYTES = 256 << 20
TOKENIZER_SECONDS = 60.0

SessionCall = grpc.aio.StreamStreamCall[session_pb2.SessionCommand, session_pb2.SessionReport]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterIdentity:
    """How this router introduces itself to decode nodes."""

    name: str
    incarnation: bytes  # 16 random bytes, from the start of the process


class NodeTransport:
    """Owns the channel to one address. Every method raises nothing but OutriderErrors."""

    def __init__(self, security: PeerSecurity, *, address: str) -> None:
        self._security = security
        self._address = address
        self._open_channel()

    def _open_channel(self) -> None:
        self._material = self._security.material
        self._channel = channel = self._security.open_channel(self._address)
        self._node = node_pb2_grpc.NodeServiceStub(channel)
        self._decode = session_pb2_grpc.DecodeServiceStub(channel)
        self._prefill = prefill_pb2_grpc.PrefillServiceStub(channel)

    async def identify(self, *, timeout_seconds: float) -> NodeInfo:
        """The first call of a connection: nothing else runs on the channel, and renewed certificates are shown."""
        if self._security.material is not self._material:
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

    async def open_session(self, identity: RouterIdentity, *, fingerprint: str) -> SessionStream:
        """Of a decode node; this router's hello has been sent."""
        stream = SessionStream(self._decode.Session(), address=self._address)
        hello = session_pb2.SessionHello(
            protocol_version=SUPPORTED_VERSIONS.newest,
            oldest_protocol_version=SUPPORTED_VERSIONS.oldest,
            incarnation=identity.incarnation,
            name=identity.name,
            fingerprint=fingerprint,
            reached_at=self._address,
        )
        await stream.write_proto(session_pb2.SessionCommand(hello=hello))
        return stream

    async def prefill(self, call: PrefillCall) -> PrefillFigures:
        """Has a prefill node compute and push. Cancelling stops both."""
        metadata = ((TRACEPARENT, call.traceparent),) if call.traceparent else None
        try:
            return figures_from_proto(await self._prefill.Prefill(CALL.to_proto(call), metadata=metadata))
        except grpc.RpcError as error:
            raise from_rpc_error(error, target=self._address) from error

    async def close(self) -> None:
        await self._channel.close()


class SessionStream:
    """One session with a decode node, both directions. Every method raises OutriderError when it is broken."""

    def __init__(self, call: SessionCall, *, address: str) -> None:
        self._call = call
        self._address = address

    async def write(self, command: SequenceGroupCommand | None) -> None:
        """Sends a command; None is a heartbeat."""
        if command is None:
            await self.write_proto(session_pb2.SessionCommand(heartbeat=session_pb2.SessionHeartbeat()))
        else:
            await self.write_proto(command_to_proto(command))

    async def read(self) -> tuple[NodeInfo | None, NodeReport, list[SequenceGroupEvent]]:
        """One message; the hello comes with the first."""
        try:
            message = await self._call.read()
            if isinstance(message, session_pb2.SessionReport):
                return report_message_from_proto(message)
            if await self._call.code() is grpc.StatusCode.OK:
                raise PeerLostError("the node ended the session", node=self._address)
            raise PeerLostError(await self._call.details() or "the session broke", node=self._address)
        except grpc.RpcError as error:
            raise self._lost(error) from error
        except (InvalidRequestError, LookupError, ValueError) as error:
            raise PeerLostError(f"a message breaks the protocol: {error}", node=self._address) from error

    def cancel(self) -> None:
        """Ends the stream at once."""
        self._call.cancel()

    async def write_proto(self, message: session_pb2.SessionCommand) -> None:
        try:
            await self._call.write(message)
        except grpc.RpcError as error:
            raise self._lost(error) from error

    def _lost(self, error: grpc.RpcError) -> OutriderError:
        found = from_rpc_error(error, target=self._address)
        if isinstance(found, MismatchError):
            return found
        return PeerLostError(found.message, node=self._address)
