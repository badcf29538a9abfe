"""What crosses the border between event loop and engine thread: frozen, picklable values."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from outrider.errors import OutriderError
from outrider.prefill import PrefillCall, PrefillFigures, TimedPart
from outrider.profile import EndProfile, StartProfile


@dataclass(frozen=True, slots=True)
class PrefillJob:
    """One prompt to compute and push; the call has been checked."""

    job_id: int  # unique in this process, rising
    call: PrefillCall
    arrived_at: float = field(default_factory=time.monotonic)


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
    pushed: tuple[TimedPart, ...] = ()  # by the monotonic clock, too
    error: OutriderError | None = None


@dataclass(frozen=True, slots=True)
class HeldRead:
    """From a push's thread to the engine thread: the held prefix has been read, or it cannot be."""

    job_id: int
    has_read: bool


@dataclass(frozen=True, slots=True)
class PushEnded:
    """From a push's thread to the engine thread."""

    job_id: int
    outcome: PushOutcome


@dataclass(frozen=True, slots=True)
class Stop:
    """The engine thread gives everything up and ends."""


Command = PrefillJob | CancelJob | HeldRead | PushEnded | StartProfile | EndProfile | Stop


@dataclass(frozen=True, slots=True)
class JobEnded:
    """From the engine thread to the event loop: figures of a push that was committed, or why there are none."""

    job_id: int
    result: PrefillFigures | OutriderError
