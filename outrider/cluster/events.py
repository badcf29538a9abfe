"""Events that a local cluster reports while it runs."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class EventKind(enum.Enum):
    STARTING = "starting"
    LISTENING = "listening"
    PROGRESS = "progress"
    SERVING = "serving"
    DIED = "died"
    FAILED = "failed"
    STOPPING = "stopping"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterEvent:
    """A change of one process. `done` and `total` belong to PROGRESS (total 0: unknown)."""

    kind: EventKind
    name: str
    message: str = ""
    done: int = 0
    total: int = 0
