"""One child process: its announcements, log file and exit status, and the events about it."""

from __future__ import annotations

import enum
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from io import FileIO
from pathlib import Path
from typing import Any

from outrider.cluster.plan import ChildSpec
from outrider.errors import MAX_DESCRIPTION
from outrider.own_modules import kill_with_parent, without_working_folder
from outrider.service.announce import ANNOUNCE_VARIABLE

TAIL_BYTES = 16_384
"""Bytes at the end of a log that are searched for the cause of a failure."""


class ChildState(enum.Enum):
    PLANNED = "planned"
    STARTING = "starting"
    SERVING = "serving"
    DOWN = "down"  # died; will be restarted
    STOPPING = "stopping"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeProcess:
    """A snapshot of a child process."""

    name: str  # "decode-0"
    role: str  # "decode_node"
    state: ChildState
    pid: int  # 0 if there is no process
    address: str  # host:port; empty until the process listens
    metrics_address: str | None
    num_restarts: int
    log_path: Path
    description: Mapping[str, Any] = field(default_factory=dict)  # announced when the process began to serve


class EventKind(enum.Enum):
    STARTING = "starting"
    LISTENING = "listening"
    PROGRESS = "progress"
    SERVING = "serving"
    REFUSED = "refused"  # another process refused this one and continues without it
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
    """A child process. Owned by the supervisor's thread, except `send_signal`, which needs the cluster's lock."""

    def __init__(self, spec: ChildSpec, log_path: Path) -> None:
        self.spec = spec
        self.name, self.role, self.is_one_shot = spec.name, spec.role, spec.is_one_shot
        self.log_path = log_path
        self.state = ChildState.PLANNED
        self.ports: dict[str, int] = {}  # reserved for it: "port" and "metrics_port"
        self.address = ""
        self.metrics_address: str | None = None
        self.drain_seconds = 0.0  # as announced
        self.description: Mapping[str, Any] = {}
        self.exit_status: int | None = None
        self.num_restarts = 0
        self.num_failures = 0
        self.refused_by: set[str] = set()  # names of routers that refused this node before they ever served
        self.start_at = 0.0
        self.serving_since: float | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._announced: FileIO | None = None  # the pipe of announcements, while the process runs
        self._buffer = b""
        self._failure = ""  # the announced cause of failure
        self._log: FileIO | None = None  # the open log, while the process runs
        self._log_start = 0  # offset in the log at which this process's output begins

    @property
    def pid(self) -> int:
        return 0 if self._process is None else self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None

    @property
    def has_never_served(self) -> bool:
        """Whether none of its processes has ever served."""
        return self.serving_since is None and self.num_restarts == 0

    def spawn(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        """Starts the process. The calling thread must outlive the process. Raises: OSError.

        If no log can be opened, the process starts without one, since a full disk or a cleaner of temporary files must
        not prevent a restart.
        """
        log = self._open_log()
        log_start = log.seek(0, os.SEEK_END)
        reader, writer = os.pipe2(os.O_CLOEXEC)
        try:
            self._process = subprocess.Popen(  # noqa: S603 the cluster's own command
                kill_with_parent(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(writer,),
                env={**without_working_folder(environ), ANNOUNCE_VARIABLE: str(writer)},
                start_new_session=True,  # Ctrl-C in the terminal goes to the supervisor only
            )
        except OSError:
            os.close(reader)
            log.close()
            raise
        finally:
            os.close(writer)
        os.set_blocking(reader, False)
        self._announced, self._buffer, self._failure = FileIO(reader), b"", ""
        self._log, self._log_start = log, log_start
        self.state, self.serving_since = ChildState.STARTING, None

    def announcements(self) -> list[dict[str, Any]]:
        """Returns the announcements since the last call."""
        self._hear()
        *lines, self._buffer = self._buffer.split(b"\n")
        said = [json.loads(line) for line in lines if line.startswith(b"{")]
        self._failure = next((each["failed"] for each in said if "failed" in each), self._failure)
        return [each for each in said if "failed" not in each]

    def _hear(self) -> None:
        if self._announced is not None:
            self._buffer += self._announced.readall() or b""  # None: nothing new

    def bound_log(self, max_bytes: int) -> None:
        """Moves a log that has grown beyond `max_bytes` to `LOG.1`, which is overwritten. Raises: OSError.

        The log is copied and truncated, since the process and its libraries continue to append to the same file, even
        if its name was removed.
        """
        if self._log is None or os.fstat(self._log.fileno()).st_size <= max_bytes:
            return
        try:
            self._log.seek(-max_bytes, os.SEEK_END)
            recent = self._log.read(max_bytes)  # at most this much, however fast the log grows
            self.log_path.with_name(f"{self.log_path.name}.1").write_bytes(recent)
        finally:  # a full disk also needs the truncation, which frees space
            self._log.truncate(0)
            self._log_start = 0

    def _open_log(self) -> FileIO:
        try:
            self.log_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            return FileIO(self.log_path, "a+")
        except OSError:
            return FileIO(os.devnull, "a+")

    def reap(self) -> int | None:
        """Returns the exit status if the process has ended (negative: the signal's number), else None."""
        if self._process is None:
            return None
        status = self._process.poll()
        if status is None:
            return None
        self._hear()
        for file in filter(None, (self._announced, self._log)):
            file.close()
        self._process = self._announced = self._log = None
        self.exit_status = status
        return status

    def send_signal(self, number: signal.Signals) -> bool:
        """Sends the signal. Returns False if there is no process. A child keeps its pid until it is reaped, so no other
        process can be hit.
        """
        if self._process is None or self._process.poll() is not None:
            return False
        self._process.send_signal(number)
        return True

    def failure_reason(self) -> str:
        """Returns the announced cause of failure, or else the log's last line that is an error or is not a structured
        event.
        """
        if self._failure:
            return self._failure
        try:
            with self.log_path.open("rb") as log:
                log.seek(max(log.seek(0, os.SEEK_END) - TAIL_BYTES, self._log_start))
                lines = log.read().decode(errors="replace").splitlines()
        except OSError:
            return ""
        for line in filter(str.strip, reversed(lines)):
            try:
                event = json.loads(line)
            except ValueError:
                return line.strip()[:MAX_DESCRIPTION]
            if isinstance(event, dict) and event.get("level") in ("error", "critical"):
                return ": ".join(str(event[key]) for key in ("event", "error") if event.get(key))
        return ""

    def snapshot(self) -> NodeProcess:
        return NodeProcess(**{field.name: getattr(self, field.name) for field in fields(NodeProcess)})
