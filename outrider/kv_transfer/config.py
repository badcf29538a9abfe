"""Settings of the sender's side."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.config import setting
from outrider.kv_transfer.base import PROGRESS_SECONDS
from outrider.kv_transfer.frames import MAX_FRAME_BYTES

ARENA_DIRECTORY = "/dev/shm"  # noqa: S108 shared memory is what it is for


@dataclass(frozen=True, slots=True, kw_only=True)
class KvTransferConfig:
    """How a prefill node pushes KV."""

    connector: str = setting(
        "auto",
        choices=("auto", "shared_memory", "grpc"),
        help="auto: shared memory where the decode node can attach to it, else grpc.",
    )
    frame_bytes: int = setting(
        2 << 20, at_least=4096, at_most=MAX_FRAME_BYTES, help="Largest payload of a frame; also the size of a slot."
    )
    arena_bytes: int = setting(
        32 << 20, at_least=1 << 20, at_most=1 << 30, help="Shared memory for each decode node; taken as it is needed."
    )
    window_bytes: int = setting(
        16 << 20, at_least=1 << 16, at_most=1 << 30, help="Payload that grpc may hold unacknowledged, per transfer."
    )
    connect_seconds: float = setting(5.0, above=0, at_most=600, help="How long a decode node may take to attach.")
    progress_seconds: float = setting(
        PROGRESS_SECONDS,
        above=0,
        at_most=600,
        help="A decode node that acknowledges nothing for longer is taken for dead.",
    )
    arena_directory: str = setting(ARENA_DIRECTORY, help="A file system in memory, shared with the decode node.")

    @property
    def keep_alive_seconds(self) -> float:
        """How often a sender with nothing to send says that it lives: receivers do not know `progress_seconds`."""
        return min(self.progress_seconds, PROGRESS_SECONDS) / 4
