"""A service process, seen from outside: its announcements, its log and its exit status."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

WAIT_SECONDS = 60.0

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def run_python(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs `python ARGUMENTS…` to its end and returns what it wrote. `options` are those of subprocess.run."""
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=240, **options)


class RoleProcess:
    """A process of `python -m ROLE --set …` or another command. Its context kills it at the end if it still runs."""

    def __init__(self, role: str, *settings: str, command: list[str] | None = None, **environ: str) -> None:
        self._reader, writer = os.pipe()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 closed by `wait`
        arguments = [part for setting in settings for part in ("--set", setting)]
        self.process = subprocess.Popen(
            [*(command or [sys.executable, "-m", role]), *arguments],
            pass_fds=(writer,),
            stderr=self._stderr,
            env={**os.environ, "OUTRIDER_ANNOUNCE_FD": str(writer), **environ},
        )
        os.close(writer)
        self._lines = self._read_lines()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait(WAIT_SECONDS)

    def announcement(self, key: str) -> dict[str, Any]:
        """Returns the next announcement that has this key."""
        for said in self._lines:
            if key in said:
                return said
        raise AssertionError(f"ended without announcing {key!r}:\n{self.stderr()}")

    def serving(self) -> str:
        """Waits until the process serves, and returns its address."""
        return self.announcement("serving")["address"]

    def end(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, list[dict[str, Any]]]:
        """Sends the signal, and returns the exit status and the log."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self, timeout_seconds: float = WAIT_SECONDS) -> tuple[int, list[dict[str, Any]]]:
        """Waits until the process ends by itself, and returns the exit status and the log."""
        status = self.process.wait(timeout_seconds)
        os.close(self._reader)
        return status, self.log()

    def stderr(self) -> str:
        size = os.fstat(self._stderr.fileno()).st_size
        return os.pread(self._stderr.fileno(), size, 0).decode()

    def log(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.stderr().splitlines() if line.startswith("{") and line.endswith("}")]

    def wait_for_log(self, event: str, condition: Callable[[dict[str, Any]], bool] = lambda _line: True) -> dict:
        """Waits for the first log line of this event that fulfils the condition, and returns it."""
        deadline = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < deadline:
            for line in self.log():
                if line["event"] == event and condition(line):
                    return line
            assert self.process.poll() is None, f"it ended without {event!r}:\n{self.stderr()}"
            time.sleep(0.02)
        raise AssertionError(f"no {event!r} in {WAIT_SECONDS} s:\n{self.stderr()}")

    def _read_lines(self) -> Iterator[dict[str, Any]]:
        buffer = b""
        selector = selectors.DefaultSelector()
        selector.register(self._reader, selectors.EVENT_READ)
        while True:
            assert selector.select(WAIT_SECONDS), f"nothing was announced:\n{self.stderr()}"
            data = os.read(self._reader, 4096)
            if not data:
                return
            buffer += data
            *lines, buffer = buffer.split(b"\n")
            yield from map(json.loads, lines)


def check_health(channel: grpc.Channel, service: str = "") -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    return stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=WAIT_SECONDS).status


def watch_health(channel: grpc.Channel, service: str = "") -> Iterator[int]:
    """Yields the present state, then each state that follows."""
    stub = health_pb2_grpc.HealthStub(channel)
    for response in stub.Watch(health_pb2.HealthCheckRequest(service=service), timeout=WAIT_SECONDS):
        yield response.status
