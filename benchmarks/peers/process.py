"""Runs a peer's processes in a separate process group, measures them, and ends them in all cases."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

import psutil

from outrider.own_modules import kill_with_parent

END_SECONDS = 15.0
POLL_SECONDS = 0.2


class PeerError(Exception):
    """A peer cannot be installed, started or asked. The message is one line."""


class ServerProcess:
    """A command and its children, which end with the `with` block."""

    def __init__(
        self, command: Sequence[str], *, environment: Mapping[str, str], log: Path, speaks_lines: bool = False
    ) -> None:
        """`speaks_lines`: whether standard input and output are the pipes of `popen`. Otherwise output is logged."""
        self._log = log
        self._output = log.open("ab")
        self.popen = subprocess.Popen(
            # The kernel kills the process when the thread that started it ends, so start peers in the main thread.
            kill_with_parent(command),
            env={**os.environ, **environment},
            stdin=subprocess.PIPE if speaks_lines else subprocess.DEVNULL,
            stdout=subprocess.PIPE if speaks_lines else self._output,
            stderr=self._output,
            start_new_session=True,
            text=True,
            cwd=log.parent,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Sends SIGTERM to the group, then SIGKILL to what remains, including children that have left the group."""
        processes = self.processes()
        self._signal(signal.SIGTERM)
        _, alive = psutil.wait_procs(processes, timeout=END_SECONDS)
        self._signal(signal.SIGKILL)
        for process in alive:
            process.kill()
        psutil.wait_procs(alive, timeout=END_SECONDS)
        self.popen.wait(END_SECONDS)
        for stream in (self.popen.stdin, self.popen.stdout, self._output):
            if stream is not None:
                stream.close()

    @property
    def pid(self) -> int:
        return self.popen.pid

    def processes(self) -> list[psutil.Process]:
        try:
            root = psutil.Process(self.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def resident_bytes(self) -> int:
        """Returns the memory in bytes of all processes together. Shared pages count once (proportional set size)."""
        total = 0
        for process in self.processes():
            try:
                total += process.memory_full_info().pss
            except psutil.Error:  # it has ended
                continue
        return total

    def wait_until(self, is_ready: Callable[[], bool], *, seconds: float) -> None:
        """Waits until `is_ready` is true. Raises: PeerError if the command ends first, or is not ready in time."""
        deadline = time.monotonic() + seconds
        while not is_ready():
            if self.popen.poll() is not None:
                raise PeerError(f"ended with status {self.popen.returncode}: {self.last_words()}")
            if time.monotonic() > deadline:
                raise PeerError(f"not ready after {seconds:g} s: {self.last_words()}")
            time.sleep(POLL_SECONDS)

    def last_words(self) -> str:
        """Returns the log's last line that is not blank, and the log's path."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        spoken = [line.strip() for line in lines if line.strip()]
        return f"{spoken[-1][:160]} ({self._log})" if spoken else f"nothing in {self._log}"

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            return


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_logged(command: Sequence[str], *, log: Path, seconds: float, **variables: str) -> None:
    """Runs an installation command at low priority.

    Raises: PeerError if it fails (with the log's last line) or times out.
    """
    with ServerProcess(["nice", "-n", "10", *command], environment=variables, log=log) as process:
        try:
            status = process.popen.wait(seconds)
        except subprocess.TimeoutExpired as error:
            raise PeerError(f"{command[0]} took more than {seconds:g} s ({log})") from error
        if status != 0:
            raise PeerError(f"{Path(command[0]).name} failed: {process.last_words()}")
