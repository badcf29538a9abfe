"""Fault points of processes under test. Each is armed and released by means of a file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from outrider.faults import FAULTS_VARIABLE, ONCE_VARIABLE


class FaultPoints:
    """Points that are disarmed at first. Processes started with `environ` wait at an armed point, one at a time."""

    def __init__(self, directory: Path, points: Iterable[str]) -> None:
        self._prefix = directory / "point"
        self._points = tuple(points)
        self.environ = {
            FAULTS_VARIABLE: ";".join(f"{point}:*=hold" for point in self._points),
            ONCE_VARIABLE: str(self._prefix),
        }
        self.disarm_all()

    def arm(self, point: str) -> None:
        """Arms the point: the next process that reaches it waits there."""
        self._file(point).unlink()

    def waiting_pid(self, point: str) -> int | None:
        """Returns the id of the process that waits at the point."""
        try:
            return int(self._file(point).read_text())
        except (FileNotFoundError, ValueError):
            return None

    def release(self, point: str) -> None:
        """Disarms the point, and lets the process that waits there go on."""
        self._file(point).write_text("")

    def let_pass(self, point: str) -> None:
        """Lets the process that waits there go on, if there is one. The point stays armed."""
        if self.waiting_pid(point) is not None:
            self._file(point).unlink()

    def disarm_all(self) -> None:
        for point in self._points:
            self.release(point)

    def _file(self, point: str) -> Path:
        return self._prefix.with_name(f"{self._prefix.name}.{point}")
