"""Settings of KV transfers."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.config.settings import fixed, setting

CUDA_IPC = "cuda_ipc"
CONNECTORS = (CUDA_IPC, "shared_memory", "grpc")
"""Connectors, which are ways to carry payload; the best first."""
PROGRESS_SECONDS = 10.0
"""Seconds of silence after which receivers treat a sender as failed, and by default senders a receiver."""
ARENA_DIRECTORY = "/dev/shm"  # noqa: S108 a file system for shared memory


@dataclass(frozen=True, slots=True, kw_only=True)
class KvTransferConfig:
    """Section `kv_transfer`: how prefill nodes push KV to decode nodes."""

    connector: str = setting(
        "auto",
        choices=("auto", *CONNECTORS),
        help="On a prefill node, the way to send: auto is CUDA IPC between GPUs of one machine, else shared memory if "
        "the decode node can attach to it, else grpc. On a decode node, the ways to accept: auto is all of them.",
    )
    port: int = setting(0, at_least=0, at_most=65535, help="Port on which a decode node receives KV; 0: a free one.")
    host: str = setting("", help="Interface on which a decode node receives KV; empty: the server's.")
    arena_bytes: int = fixed(32 << 20)  # main or GPU memory shared with each decode node, allocated as needed
    frame_bytes: int = fixed(2 << 20)  # largest payload of a frame, and size of an arena's slot: copying it is cheap
    device_frame_bytes: int = fixed(4 << 20)  # same for CUDA IPC, where the cost per frame exceeds that of its bytes
    window_bytes: int = fixed(16 << 20)  # unacknowledged payload to one decode node by grpc; enough for a busy link
    connect_seconds: float = fixed(5.0)  # timeout for a decode node to attach, which takes one round trip
    progress_seconds: float = fixed(PROGRESS_SECONDS)  # a decode node that acknowledges nothing for this long is lost
    arena_directory: str = fixed(ARENA_DIRECTORY)  # where memory is shared with the decode node

    def __post_init__(self) -> None:
        object.__setattr__(self, "host", self.host.strip("[]"))  # written around an IPv6 address before a port

    @property
    def accepted(self) -> tuple[str, ...]:
        """The connectors that a prefill node tries and a decode node offers, the best first."""
        return CONNECTORS if self.connector == "auto" else (self.connector,)

    @property
    def keep_alive_seconds(self) -> float:
        """Seconds between keep-alive messages of an idle sender. Receivers do not know its `progress_seconds`."""
        return min(self.progress_seconds, PROGRESS_SECONDS) / 4
