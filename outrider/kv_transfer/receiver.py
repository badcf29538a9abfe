"""The decode node's KV ingest: a synchronous gRPC server on its own port and threads.

Copying and hashing release the GIL and stay off the token loop. Handlers take and
return raw bytes: a frame is not parsed by protobuf (see `frames`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc

from outrider.errors import ConfigError
from outrider.kv_transfer.arena import ArenaReader
from outrider.kv_transfer.base import DrainState, TransferStats
from outrider.kv_transfer.config import ARENA_DIRECTORY, CONNECTORS, CUDA_IPC, PROGRESS_SECONDS
from outrider.kv_transfer.cuda_ipc import DeviceArenaReader, SharedGpu
from outrider.kv_transfer.frames import MAX_MESSAGE_BYTES, METHOD_NAME, SERVICE_NAME
from outrider.kv_transfer.inbox import TransferInbox
from outrider.kv_transfer.receiver_stream import ReceiverStream
from outrider.kv_transfer.watchdog import Watchdog
from outrider.rpc.channels import server_options
from outrider.rpc.tls import PLAINTEXT, PeerSecurity

HELLO_SECONDS = 2.0
"""How long a stream may take to attach to a transfer."""


class KvReceiver:
    """Receives transfers for one process; `inbox` knows their states.

    Each stream holds one thread. Attached ones are as many as the owner has opened transfers;
    of those that are not attached `max_unattached` may stay, for `HELLO_SECONDS`: another one
    displaces the oldest, so that peers who say nothing, or lie, keep no honest sender out.
    Callbacks come from those threads and must be quick: hand the news to the owner's queue.
    """

    def __init__(
        self,
        *,
        incarnation: bytes,
        host: str,
        port: int = 0,
        connectors: Sequence[str] = CONNECTORS,
        on_complete: Callable[[bytes, TransferStats], None],
        on_failed: Callable[[bytes, str], None],
        progress_seconds: float = PROGRESS_SECONDS,
        max_senders: int = 1024,
        max_unattached: int = 64,
        arena_directory: str = ARENA_DIRECTORY,
        gpu: SharedGpu | None = None,
        security: PeerSecurity = PLAINTEXT,
    ) -> None:
        """`progress_seconds`: a sender that is silent for longer has failed (it reports four times as often).

        `max_senders`: of all streams; beyond, they are refused. `gpu`: that has the cache, where it can map memory.
        """
        self._address = f"[{host}]" if ":" in host else host
        self._wanted_port = port
        self._progress_seconds = progress_seconds
        self._max_senders = max_senders
        self._max_unattached = max_unattached
        self.inbox = TransferInbox(incarnation=incarnation, on_complete=on_complete, on_failed=on_failed)
        self._watchdog = Watchdog()
        readers = {"grpc": None, "shared_memory": ArenaReader(arena_directory)}
        if gpu is not None:
            readers[CUDA_IPC] = DeviceArenaReader(gpu, arena_directory)
        self._readers = {name: readers[name] for name in connectors if name in readers}
        self._streams: dict[ReceiverStream, None] = {}  # insertion and removal are atomic
        self._unattached: dict[ReceiverStream, None] = {}  # of those, oldest first
        self._unattached_lock = threading.Lock()
        self._security = security
        self._server: grpc.Server | None = None

    def start(self) -> int:
        """Listens; the port. Raises: ConfigError when the address cannot be bound, or a certificate not be read."""
        credentials = self._security.server_credentials()
        executor = ThreadPoolExecutor(self._max_senders, thread_name_prefix="kv-receiver")
        options = [
            *server_options(max_message_bytes=MAX_MESSAGE_BYTES),
            ("grpc.http2.max_frame_size", 1 << 20),
        ]
        server = grpc.server(executor, options=options, maximum_concurrent_rpcs=self._max_senders)
        handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(self._push)
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE_NAME, {METHOD_NAME: handler})])
        address = f"{self._address}:{self._wanted_port}"
        try:
            if credentials is None:
                port = server.add_insecure_port(address)
            else:
                port = server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise ConfigError(f"KV ingest cannot listen on {address}: choose another host or port") from error
        server.start()
        self._watchdog.start()
        self._server = server
        return port

    def stop(self) -> None:
        """Ends all streams and frees the port. Transfers that were open fail."""
        if self._server is not None:
            self._server.stop(grace=0).wait(timeout=1)
            self._server = None
        self._watchdog.stop()
        for reader in filter(None, self._readers.values()):
            reader.close()

    def close(self, transfer_id: bytes, *, timeout_seconds: float = 10.0) -> DrainState:
        """Forgets a transfer in whatever state; idempotent. After DRAINED no byte is written to its sink.

        Waits so long at most for the write in flight. UNKNOWN: keep the blocks, and call again.
        """
        state = self.inbox.close(transfer_id, timeout_seconds=timeout_seconds)
        for stream in list(self._streams):
            if stream.transfer_id == transfer_id:
                stream.end_unless_committed()
        return state

    def _push(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        if not self._security.is_peer(context.auth_context()):
            context.abort(grpc.StatusCode.PERMISSION_DENIED, self._security.explain_refusal(context.auth_context()))
        stream = ReceiverStream(inbox=self.inbox, readers=self._readers, cancel=context.cancel)
        guard = self._watchdog.watch(min(self._progress_seconds, HELLO_SECONDS), stream.expire)
        self._streams[stream] = None
        self._let_in(stream)
        # The callback comes when the peer is gone even while this thread is busy writing.
        if not context.add_callback(stream.break_off):
            stream.break_off()
        try:
            for message in requests:
                if stream.is_attached:
                    guard.touch()
                reply = stream.handle(message)
                if stream.is_attached:  # before the reply: the peer may take its time to read it
                    self._forget_unattached(stream)
                    guard.seconds = self._progress_seconds
                    guard.touch()
                if reply is not None:
                    yield reply
                if stream.is_attached:
                    guard.touch()
        finally:
            guard.stop()
            stream.break_off()
            self._forget_unattached(stream)
            self._streams.pop(stream, None)

    def _let_in(self, stream: ReceiverStream) -> None:
        displaced = None
        with self._unattached_lock:
            self._unattached[stream] = None
            if len(self._unattached) > self._max_unattached:
                displaced = next(iter(self._unattached))
                del self._unattached[displaced]
        if displaced is not None:
            displaced.cancel()  # it has waited longest to attach

    def _forget_unattached(self, stream: ReceiverStream) -> None:
        with self._unattached_lock:
            self._unattached.pop(stream, None)
