"""One child process: its announcements, log file and exit status, and the events that are told of it."""

from __future__ import annotations

import enum
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.cluster.plan import ChildSpec
from outrider.parent_death import PARENT_VARIABLE
from outrider.service.announce import ANNOUNCE_VARIABLE

LAUNCHER = Path(__file__).with_name("launcher.py")


class ChildState(enum.Enum):
    PLANNED = "planned"
    STARTING = "starting"
    SERVING = "serving"
    DOWN = "down"  # died; will be started again
    STOPPING = "stopping"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeProcess:
    """A child as it is at one moment."""

    name: str  # "decode-0"
    role: str  # "decode_node"
    state: ChildState
    pid: int  # 0 when there is no process
    address: str  # host:port; empty until it listens
    metrics_address: str | None
    num_restarts: int
    log_path: Path
    description: Mapping[str, Any] = field(default_factory=dict)  # as announced when it began to serve


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


class Child:
    """Owned by the supervisor's thread, apart from `send_signal`, which takes the cluster's lock."""

    def __init__(self, spec: ChildSpec, log_path: Path) -> None:
        self.spec = spec
        self.log_path = log_path
        self.state = ChildState.PLANNED
        self.address = ""
        self.metrics_address: str | None = None
        self.drain_seconds = 0.0  # as it announces
        self.description: Mapping[str, Any] = {}
        self.exit_status: int | None = None
        self.num_restarts = 0
        self.num_failures = 0
        self.start_at = 0.0
        self.serving_since: float | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._descriptor: int | None = None
        self._buffer = b""

    @property
    def pid(self) -> int:
        return 0 if self._process is None else self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def spawn(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        """Starts the process. The calling thread must outlive it. Raises: OSError."""
        reader, writer = os.pipe2(os.O_CLOEXEC)
        try:
            with self.log_path.open("ab") as log:
                self._process = subprocess.Popen(  # noqa: S603 the cluster's own command
                    [sys.executable, "-I", "-S", str(LAUNCHER), str(os.getpid()), *command],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(writer,),
                    env={**environ, ANNOUNCE_VARIABLE: str(writer), PARENT_VARIABLE: str(os.getpid())},
                    start_new_session=True,  # Ctrl-C in the terminal is the supervisor's
                )
        except OSError:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        os.set_blocking(reader, False)
        self._descriptor, self._buffer = reader, b""
        self.state, self.serving_since = ChildState.STARTING, None

    def announcements(self) -> list[dict[str, Any]]:
        """New announcements since the last call."""
        if self._descriptor is None:
            return []
        try:
            while data := os.read(self._descriptor, 65536):
                self._buffer += data
        except BlockingIOError:
            pass  # nothing more for now
        *lines, self._buffer = self._buffer.split(b"\n")
        return [json.loads(line) for line in lines if line.startswith(b"{")]

    def reap(self) -> int | None:
        """The exit status once the process has ended (negative: the signal's number), else None."""
        if self._process is None:
            return None
        status = self._process.poll()
        if status is None:
            return None
        self._process = None
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        self.exit_status = status
        return status

    def send_signal(self, number: signal.Signals) -> bool:
        """False when there is no process. Never reaches another process: a child keeps its pid until it is reaped."""
        if self._process is None or self._process.poll() is not None:
            return False
        self._process.send_signal(number)
        return True

    def last_words(self) -> str:
        """The last error in the log, or its last line."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(max(self.log_path.stat().st_size - 16_384, 0))
                lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
        except OSError:
            return ""
        for line in reversed(lines):
            try:
                event = json.loads(line)
            except ValueError:
                return line.strip()
            if isinstance(event, dict) and event.get("level") in ("error", "critical"):
                return ": ".join(str(event[key]) for key in ("event", "error") if event.get(key))
        return lines[-1].strip() if lines else ""

    def snapshot(self) -> NodeProcess:
        return NodeProcess(
            name=self.spec.name,
            role=self.spec.role,
            state=self.state,
            pid=self.pid,
            address=self.address,
            metrics_address=self.metrics_address,
            num_restarts=self.num_restarts,
            log_path=self.log_path,
            description=self.description,
        )
