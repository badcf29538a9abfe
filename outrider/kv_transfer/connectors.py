"""Opens senders. With `auto` a sender uses the best connector that its receiver can attach to."""

from __future__ import annotations

import threading
from collections import OrderedDict

import grpc

from outrider.errors import NotSupportedError
from outrider.kv_transfer.base import TransferSpec
from outrider.kv_transfer.config import CUDA_IPC, KvTransferConfig
from outrider.kv_transfer.cuda_ipc import SharedGpu
from outrider.kv_transfer.frames import MAX_MESSAGE_BYTES
from outrider.kv_transfer.sender import Sender
from outrider.kv_transfer.sender_stream import SenderStream
from outrider.kv_transfer.shared_memory import ArenaSource
from outrider.kv_transfer.shared_window import SharedWindow
from outrider.rpc.tls import PLAINTEXT, PeerSecurity, TlsMaterial

MAX_CHANNELS = 256


class Connector:
    """Opens senders, and keeps the gRPC connection and the arena that transfers to one receiver share. Thread-safe.

    There is one connection to each address, and no other channel uses it.
    """

    def __init__(
        self, config: KvTransferConfig, security: PeerSecurity = PLAINTEXT, *, gpu: SharedGpu | None = None
    ) -> None:
        """`gpu`: the GPU with the KV cache, if it can share memory."""
        self.name = config.connector  # "auto" or one of CONNECTORS
        self.security = security
        self._sources: dict[str, ArenaSource | None] = {}  # by connector, best first; None: messages carry the payload
        for name in config.accepted:
            if name == "grpc":
                self._sources[name] = None
            elif name != CUDA_IPC or gpu is not None:
                self._sources[name] = ArenaSource(config, gpu if name == CUDA_IPC else None)
        self.config = config
        self._lock = threading.Lock()
        self._links: OrderedDict[str, tuple[grpc.Channel, SharedWindow]] = OrderedDict()  # most recently used last
        self._material: TlsMaterial | None = None  # the certificates with which these channels were opened

    def connect(self, address: str, spec: TransferSpec, *, is_part: bool = False) -> Sender:
        """Attaches to the transfer that the receiver at host:port has opened.

        `is_part`: whether this process sends only a part of the KV, and another one, which has attached before, commits
        the transfer.

        Raises: PeerLostError if no receiver answers, AbortedError if it does not know the transfer,
        NotSupportedError if it cannot attach by any of the connectors.
        """
        stream = self._open_stream(address, is_part=is_part)
        try:
            for name, source in self._sources.items():
                arena = None if source is None else source.offer(stream, spec)
                if arena is not None or (source is None and stream.hello(spec) is not None):
                    return Sender(
                        spec,
                        stream,
                        connector=name,
                        max_frame_bytes=self.config.frame_bytes if arena is None else arena.slot_bytes,
                        arena=arena,
                        reopen=lambda: self._open_stream(address),
                    )
            raise NotSupportedError(f"KV receiver {address} cannot attach by {', '.join(self._sources)}")
        except Exception:
            stream.close()
            raise

    def close(self) -> None:
        """Closes connections and arenas, which fails senders that are still open. Idempotent."""
        with self._lock:
            links = list(self._links.values())
            self._links.clear()
        for channel, _ in links:
            channel.close()
        for source in filter(None, self._sources.values()):
            source.close()

    def _open_stream(self, address: str, *, is_part: bool = False) -> SenderStream:
        channel, window = self._link(address)
        return SenderStream(channel, address=address, window=window, config=self.config, is_part=is_part)

    def _link(self, address: str) -> tuple[grpc.Channel, SharedWindow]:
        material = self.security.material
        with self._lock:
            if material is not self._material:
                self._links.clear()  # each connection closes after its last transfer
                self._material = material
            link = self._links.get(address)
            if link is None:
                channel = self.security.open_bulk_channel(address, max_message_bytes=MAX_MESSAGE_BYTES)
                link = self._links[address] = (channel, SharedWindow(self.config.window_bytes))
            self._links.move_to_end(address)
            if len(self._links) > MAX_CHANNELS:
                self._links.popitem(last=False)[1][0].close()  # the least recently used link, since nodes come and go
            return link
