"""What crosses the border between event loop and engine thread: frozen, picklable values."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.errors import OutriderError
from outrider.profile import EndProfile, StartProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillJob:
    """One prompt to compute and push."""

    job_id: int  # unique in this process, rising
    request_id: str  # for logs only
    transfer_id: bytes
    token_ids: tuple[int, ...]  # at least one
    kv_address: str
    decode_incarnation: bytes
    held_prefix_length: int  # tokens from the start that need no push
    priority: int = 0  # higher goes first
    cache_salt: bytes = b""  # only jobs of the same salt share cached KV


@dataclass(frozen=True, slots=True)
class CancelJob:
    """Nobody wants the result any more. No answer follows."""

    job_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PushOutcome:
    """How a push ended; times on the monotonic clock. From here on it reads no KV."""

    connector: str = ""
    kv_bytes: int = 0
    first_frame_at: float | None = None
    committed_at: float | None = None
    error: OutriderError | None = None


@dataclass(frozen=True, slots=True)
class PushEnded:
    """From a push's thread to the engine thread."""

    job_id: int
    outcome: PushOutcome


@dataclass(frozen=True, slots=True)
class Stop:
    """The engine thread gives everything up and ends."""


Command = PrefillJob | CancelJob | PushEnded | StartProfile | EndProfile | Stop


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillResult:
    """As PrefillResponse of prefill.proto."""

    num_cached_tokens: int
    num_computed_tokens: int
    compute_seconds: float
    connector: str
    kv_bytes: int
    transfer_seconds: float
    exposed_seconds: float


@dataclass(frozen=True, slots=True)
class JobEnded:
    """From the engine thread to the event loop; `error` is None when the commit succeeded."""

    job_id: int
    result: PrefillResult | OutriderError
