"""One child process: its announcements, log file and exit status, and the events that are told of it."""

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
from outrider.own_modules import tied, without_working_folder
from outrider.service.announce import ANNOUNCE_VARIABLE

TAIL_BYTES = 16_384
"""Of a log, in which last words are looked for."""


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
    REFUSED = "refused"  # by another process, which goes on without it
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
        self.name, self.role, self.is_one_shot = spec.name, spec.role, spec.is_one_shot
        self.log_path = log_path
        self.state = ChildState.PLANNED
        self.address = ""
        self.metrics_address: str | None = None
        self.drain_seconds = 0.0  # as it announces
        self.description: Mapping[str, Any] = {}
        self.exit_status: int | None = None
        self.num_restarts = 0
        self.num_failures = 0
        self.refused_by: set[str] = set()  # names of routers that still wait for nodes
        self.start_at = 0.0
        self.serving_since: float | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._announced: FileIO | None = None  # what the process announces, while it runs
        self._buffer = b""
        self._failure = ""  # as it announced
        self._log: FileIO | None = None  # while the process runs
        self._log_start = 0  # where this life's part of the log begins

    @property
    def pid(self) -> int:
        return 0 if self._process is None else self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None

    @property
    def has_never_served(self) -> bool:
        """In no life."""
        return self.serving_since is None and self.num_restarts == 0

    def spawn(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        """Starts the process. The calling thread must outlive it. Raises: OSError.

        It starts without a log where none can be opened: a disk that is full later, or a cleaner of temporary files,
        must not keep a process from being started again.
        """
        log = self._open_log()
        log_start = log.seek(0, os.SEEK_END)
        reader, writer = os.pipe2(os.O_CLOEXEC)
        try:
            self._process = subprocess.Popen(  # noqa: S603 the cluster's own command
                tied(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(writer,),
                env={**without_working_folder(environ), ANNOUNCE_VARIABLE: str(writer)},
                start_new_session=True,  # Ctrl-C in the terminal is the supervisor's
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
        """New announcements since the last call."""
        self._hear()
        *lines, self._buffer = self._buffer.split(b"\n")
        said = [json.loads(line) for line in lines if line.startswith(b"{")]
        self._failure = next((each["failed"] for each in said if "failed" in each), self._failure)
        return [each for each in said if "failed" not in each]

    def _hear(self) -> None:
        if self._announced is not None:
            self._buffer += self._announced.readall() or b""  # None: nothing new for now

    def bound_log(self, max_bytes: int) -> None:
        """A log that has grown beyond this goes to `LOG.1`, whose content is lost. Raises: OSError.

        It is copied and emptied: the process, and libraries in it, go on writing to the same file, at its end; also
        when somebody has removed its name.
        """
        if self._log is None or os.fstat(self._log.fileno()).st_size <= max_bytes:
            return
        try:
            self._log.seek(-max_bytes, os.SEEK_END)
            recent = self._log.read(max_bytes)  # no more, however fast it grows
            self.log_path.with_name(f"{self.log_path.name}.1").write_bytes(recent)
        finally:  # also on a full disk: this makes room
            self._log.truncate(0)
            self._log_start = 0

    def _open_log(self) -> FileIO:
        try:
            self.log_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            return FileIO(self.log_path, "a+")
        except OSError:
            return FileIO(os.devnull, "a+")

    def reap(self) -> int | None:
        """The exit status once the process has ended (negative: the signal's number), else None."""
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
        """False when there is no process. Never reaches another process: a child keeps its pid until it is reaped."""
        if self._process is None or self._process.poll() is not None:
            return False
        self._process.send_signal(number)
        return True

    def last_words(self) -> str:
        """Why it failed, as it announced; otherwise the last line of its log that is an error or no event."""
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
