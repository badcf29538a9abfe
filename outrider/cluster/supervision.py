"""Timeouts and restart delays of a cluster."""

from __future__ import annotations

from dataclasses import dataclass

MAX_DOUBLINGS = 64
"""Of the restart delay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervision:
    """Timeouts and restart delays; tests choose others."""

    end_seconds: float = 1.5  # from the end of a process's drain to SIGKILL
    restart_seconds: float = 1.0  # wait before a second restart; doubled for each further one
    max_restart_seconds: float = 30.0
    stable_seconds: float = 60.0  # after serving for this long, restarts count from the first again

    def restart_delay(self, num_failures: int, *, has_served: bool) -> float:
        """Seconds, after so many earlier failures in a row: doubled each time, up to the most.

        0 after the first failure of a child that has served: requests wait for it.
        """
        if num_failures == 0 and has_served:
            return 0.0
        doublings = min(max(num_failures - 1, 0), MAX_DOUBLINGS)  # 2.0**1024 would be an error
        return min(self.restart_seconds * 2.0**doublings, self.max_restart_seconds)
