"""The decode node's KV ingest: a synchronous gRPC server on its own port and threads.

Copying and hashing release the GIL and do not run on the token loop. Handlers take and
return raw bytes, since frames are not protobuf messages (see `frames`).
"""

from __future__ import annotations

import threading
import time
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
from outrider.rpc.channels import server_options
from outrider.rpc.tls import PLAINTEXT, PeerSecurity

HELLO_SECONDS = 2.0
"""Seconds within which a stream must attach to a transfer."""


class KvReceiver:
    """Receives transfers for one process; their states are in `inbox`.

    Each stream occupies one thread. One stream is attached to each transfer that the owner has opened, or one for each
    process of the sending node. At most `max_unattached` others may wait, each for `HELLO_SECONDS`; another one
    displaces the oldest, so that silent or dishonest peers cannot keep honest senders out. Callbacks run in these
    threads and must be quick: they only put an event into the owner's queue.
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
        """`progress_seconds`: a sender that is silent for longer has failed (it sends keep-alives four times as often).

        `max_senders`: the maximum number of streams; more are refused. `gpu`: the GPU with the KV cache, if it can
        map other processes' memory.
        """
        self._address = f"[{host}]" if ":" in host else host
        self._wanted_port = port
        self._progress_seconds = progress_seconds
        self._max_senders = max_senders
        self._max_unattached = max_unattached
        self.inbox = TransferInbox(incarnation=incarnation, on_complete=on_complete, on_failed=on_failed)
        readers = {"grpc": None, "shared_memory": ArenaReader(arena_directory)}
        if gpu is not None:
            readers[CUDA_IPC] = DeviceArenaReader(gpu, arena_directory)
        self._readers = {name: readers[name] for name in connectors if name in readers}
        self._streams: dict[ReceiverStream, None] = {}  # oldest first; needs no lock: insertion and removal are atomic
        self._is_stopped = threading.Event()
        self._security = security
        self._server: grpc.Server | None = None

    def start(self) -> int:
        """Listens, and returns the port. Raises: ConfigError if the address or the certificate cannot be used."""
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
        threading.Thread(target=self._watch, name="kv-receiver-watchdog", daemon=True).start()
        self._server = server
        return port

    def stop(self) -> None:
        """Ends all streams and frees the port. Open transfers fail."""
        if self._server is not None:
            self._server.stop(grace=0).wait(timeout=1)
            self._server = None
        self._is_stopped.set()
        for reader in filter(None, self._readers.values()):
            reader.close()

    def close(self, transfer_id: bytes, *, timeout_seconds: float = 10.0) -> DrainState:
        """Removes a transfer, whatever its state. Idempotent. After DRAINED no byte is written to its blocks.

        Waits for the writes in flight, at most `timeout_seconds`. After UNKNOWN keep the blocks, and call again.
        """
        state = self.inbox.close(transfer_id, timeout_seconds=timeout_seconds)
        for stream in list(self._streams):
            if stream.transfer_id == transfer_id:
                stream.end_unless_committed()
        return state

    def _push(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        if not self._security.is_peer(context.auth_context()):
            context.abort(grpc.StatusCode.PERMISSION_DENIED, self._security.explain_refusal(context.auth_context()))
        hello_seconds = min(self._progress_seconds, HELLO_SECONDS)
        stream = ReceiverStream(
            inbox=self.inbox, readers=self._readers, cancel=context.cancel, deadline=time.monotonic() + hello_seconds
        )
        self._streams[stream] = None
        unattached = [each for each in list(self._streams) if not each.is_attached]
        for displaced in unattached[::-1][self._max_unattached :]:  # these have waited longest
            displaced.cancel()
        # The callback runs as soon as the peer is gone, even while this thread is writing.
        if not context.add_callback(stream.break_off):
            stream.break_off()
        try:
            for message in requests:
                self._move_deadline(stream)
                reply = stream.handle(message)
                self._move_deadline(stream)  # from now on the peer has time to read the reply
                if reply is not None:
                    yield reply
                    self._move_deadline(stream)
        finally:
            stream.break_off()
            self._streams.pop(stream, None)

    def _move_deadline(self, stream: ReceiverStream) -> None:
        """Extends the deadline of an attached stream, which has made progress."""
        if stream.is_attached:
            stream.deadline = time.monotonic() + self._progress_seconds

    def _watch(self) -> None:
        """Ends streams past their deadlines. TCP does not notice a frozen peer (SIGSTOP), which occupies a thread."""
        while not self._is_stopped.wait(min(self._progress_seconds, HELLO_SECONDS) / 4):
            now = time.monotonic()
            for stream in list(self._streams):
                if stream.deadline <= now:
                    stream.expire()
