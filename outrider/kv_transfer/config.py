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
        help="How a prefill node sends KV. auto: CUDA IPC between GPUs of one machine, otherwise shared memory if "
        "the decode node can attach to it, otherwise grpc. On a decode node: the connectors that it accepts; "
        "auto: all.",
    )
    port: int = setting(
        0, at_least=0, at_most=65535, help="Port on which a decode node receives KV. 0: the system chooses."
    )
    host: str = setting("", help="Interface on which a decode node receives KV. Empty: the one of the server.")
    arena_bytes: int = fixed(32 << 20)  # main or GPU memory shared with each decode node, as needed
    frame_bytes: int = fixed(2 << 20)  # largest payload of a frame, and a slot of the arena: copies of it are cheap
    device_frame_bytes: int = fixed(4 << 20)  # likewise by CUDA IPC, where a frame costs more than its bytes
    window_bytes: int = fixed(16 << 20)  # unacknowledged payload by grpc to one decode node: it keeps a link busy
    connect_seconds: float = fixed(5.0)  # for a decode node to attach; it serves, so this is a round trip
    progress_seconds: float = fixed(PROGRESS_SECONDS)  # a decode node that acknowledges nothing for so long is lost
    arena_directory: str = fixed(ARENA_DIRECTORY)  # where memory can be shared with the decode node

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
