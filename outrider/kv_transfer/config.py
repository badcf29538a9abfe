"""Settings of KV transfers."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.config.settings import fixed, setting

CUDA_IPC = "cuda_ipc"
CONNECTORS = (CUDA_IPC, "shared_memory", "grpc")
"""Names of the connectors, i.e. of the ways to carry payload, the best first."""
PROGRESS_SECONDS = 10.0
"""Seconds of silence after which a receiver treats its sender as failed; senders treat receivers alike by default."""
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
    arena_bytes: int = fixed(32 << 20)  # maximum main memory that a process shares with each decode node
    frame_bytes: int = fixed(2 << 20)  # maximum payload of a frame, and slot size of an arena; cheap to copy
    device_arena_bytes: int = fixed(256 << 20)  # maximum GPU memory shared with each decode node
    device_frame_bytes: int = fixed(32 << 20)  # for CUDA IPC, where a frame costs more than copying its bytes
    window_bytes: int = fixed(16 << 20)  # maximum unacknowledged payload from a process to a node; fills a busy link
    connect_seconds: float = fixed(5.0)  # maximum for a serving decode node to attach, which takes one round trip
    progress_seconds: float = fixed(PROGRESS_SECONDS)  # a decode node that is silent for longer counts as lost
    arena_directory: str = fixed(ARENA_DIRECTORY)  # folder of the arenas' files, shared with decode nodes

    def __post_init__(self) -> None:
        object.__setattr__(self, "host", self.host.strip("[]"))  # brackets enclose an IPv6 address before a port

    @property
    def accepted(self) -> tuple[str, ...]:
        """The connectors that a prefill node tries and a decode node offers, the best first."""
        return CONNECTORS if self.connector == "auto" else (self.connector,)

    @property
    def keep_alive_seconds(self) -> float:
        """Seconds between an idle sender's keep-alives.

        The interval suits all receivers, which use PROGRESS_SECONDS, not the sender's `progress_seconds`.
        """
        return min(self.progress_seconds, PROGRESS_SECONDS) / 4
