"""Messages between the event loop, the engine thread and the push threads. All are frozen and picklable."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from outrider.errors import OutriderError
from outrider.prefill import PrefillCall, PrefillFigures, TimedPart
from outrider.profile import EndProfile, StartProfile


@dataclass(frozen=True, slots=True)
class PrefillJob:
    """A prompt to compute and push, with its validated call."""

    job_id: int  # unique in this process, ascending
    call: PrefillCall
    arrived_at: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class CancelJob:
    """The caller's command to cancel a job. No answer follows."""

    job_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PushOutcome:
    """The result of a push that has ended and no longer reads KV. Times are on the monotonic clock."""

    connector: str = ""
    kv_bytes: int = 0
    committed_at: float | None = None
    pushed: tuple[TimedPart, ...] = ()
    error: OutriderError | None = None


@dataclass(frozen=True, slots=True)
class HeldPrefixRead:
    """A push thread's message to the engine thread: the held prefix has been read, or could not be."""

    job_id: int
    has_read: bool


@dataclass(frozen=True, slots=True)
class PushEnded:
    """A push thread's message to the engine thread at the end of the push."""

    job_id: int
    outcome: PushOutcome


@dataclass(frozen=True, slots=True)
class Stop:
    """The command to drop all jobs and end the engine thread."""


Command = PrefillJob | CancelJob | HeldPrefixRead | PushEnded | StartProfile | EndProfile | Stop


@dataclass(frozen=True, slots=True)
class JobEnded:
    """The engine thread's message to the event loop: the figures of a committed push, or an error."""

    job_id: int
    result: PrefillFigures | OutriderError
