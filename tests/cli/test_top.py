"""`outrider top` with a stand-in for the router."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from outrider.cli import top
from outrider.cli.main import main
from outrider.cli.top import WatchedCluster
from outrider.errors import PeerLostError, UnauthenticatedError
from outrider.v1 import router_pb2, router_pb2_grpc
from tests.client.answering_router import Serving
from tests.support.waiting import PATIENCE_SECONDS, until, wait_for, within

NOBODY = "127.0.0.1:1"


class WatchedRouter(router_pb2_grpc.RouterServiceServicer):
    """Sends one report, then one more for each `more.set()`. If `status` is set, rejects all calls with it."""

    def __init__(self, name="decode-0") -> None:
        self.name = name
        self.status: grpc.StatusCode | None = None
        self.num_watches = 0
        self.more = threading.Event()

    def WatchCluster(self, request, context):
        if self.status is not None:
            context.abort(self.status, "not you")
        self.num_watches += 1
        node = router_pb2.NodeStatus(
            name=self.name, role=router_pb2.NODE_ROLE_DECODE, state=router_pb2.NODE_STATE_SERVING, tokens_per_second=7.5
        )
        while True:
            yield router_pb2.WatchClusterResponse(nodes=[node], num_requests_running=3)
            if not self.more.wait(PATIENCE_SECONDS):
                return
            self.more.clear()

    def GetModel(self, request, context):
        return router_pb2.GetModelResponse(name="tiny", version="1.2.3")


@pytest.fixture
def router():
    return WatchedRouter()


@pytest.fixture
def target(router):
    serving = Serving(router)
    yield serving.address
    router.more.set()
    serving.stop()


@pytest.mark.parametrize("before", ["", f"{NOBODY},"])
def test_once_prints_a_report_as_text(target, capsys, monkeypatch, before):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["top", "--once", "--target", before + target]) == 0
    shown, errors = capsys.readouterr()
    assert errors == ""
    assert "\x1b" not in shown
    lines = shown.splitlines()
    assert lines[0] == f"outrider top  {target}{' (2 of 2)' if before else ''}  tiny  version 1.2.3"
    assert lines[-1].split()[:3] == ["decode-0", "serving", "0/0"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--once", "--target", f"{NOBODY},127.0.0.1:2"), "127.0.0.1:2 cannot be reached"),
        (("--once", "--interval", "nan"), "--interval nan is not 0.1 to 60"),
        (("--once", "--interval", "0.01"), "--interval 0.01 is not 0.1 to 60"),
        ((), "the output is not a terminal: use --once"),
    ],
)
def test_what_cannot_be_shown_is_one_clear_line(capsys, arguments, message):
    assert main(["top", *arguments]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith(f"outrider top: {message}")
    assert shown.count("\n") == 1


def test_without_rich_the_extra_is_named(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert main(["top", "--once"]) == 1
    assert "pip install 'outrider[top]'" in capsys.readouterr().err


async def test_of_two_routers_the_next_is_watched_when_one_is_gone(monkeypatch):
    monkeypatch.setattr(top, "RETRY_SECONDS", 0.0)
    servings = [Serving(WatchedRouter(name)) for name in ("first", "second")]
    cluster = WatchedCluster(",".join(serving.address for serving in servings), interval_seconds=1.0)

    def shown():
        status = cluster._history.status
        return status and status.nodes[0].name

    following = asyncio.create_task(cluster.follow())
    try:
        await until(lambda: shown() == "first")
        await asyncio.to_thread(servings[0].stop)
        await until(lambda: shown() == "second" and not cluster._error)
        await asyncio.to_thread(servings[1].stop)
        await until(lambda: "cannot be reached" in cluster._error)
        assert shown() == "second"  # the last figures remain
        assert not following.done()
    finally:
        following.cancel()
        await asyncio.wait({following})


async def test_a_router_that_says_nothing_is_given_up(router, target, monkeypatch):
    monkeypatch.setattr(top, "PATIENCE_SECONDS", 0.0)
    with pytest.raises(PeerLostError, match="does not answer"):
        await within(_read_all(WatchedCluster(target, interval_seconds=0.1)))


async def _read_all(cluster):
    async for _ in cluster._reports():
        pass


async def test_what_does_not_pass_ends_it(router, target):
    router.status = grpc.StatusCode.UNAUTHENTICATED
    with pytest.raises(UnauthenticatedError):
        await within(WatchedCluster(target, interval_seconds=1.0).follow())


class Terminal:
    """`outrider top` on a terminal of 100 columns and 24 lines."""

    def __init__(self, target: str) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
        self.before = termios.tcgetattr(slave)
        environment = {
            name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "outrider.cli.main", "top", "--interval", "0.1", "--target", target],
            stdin=slave, stdout=slave, stderr=subprocess.PIPE, env=environment | {"TERM": "xterm-256color"},
        )  # fmt: skip
        self._slave = slave
        self.shown = ""

    def read_until(self, condition: Callable[[str], object]) -> None:
        """Reads until `condition` holds for what has been shown since the cursor was last at the top."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition(self.shown.rpartition("\x1b[H")[2]):
            ready, _, _ = select.select([self._master], [], [], max(deadline - time.monotonic(), 0.0))
            assert ready, self.shown[-2000:]
            self.shown += os.read(self._master, 65536).decode(errors="replace")

    def press(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def resize(self, width: int) -> None:
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
        self.process.send_signal(signal.SIGWINCH)

    @property
    def is_stopped(self) -> bool:
        return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    @property
    def is_restored(self) -> bool:
        return termios.tcgetattr(self._slave) == self.before

    def close(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=PATIENCE_SECONDS)
        os.close(self._slave)
        os.close(self._master)


@pytest.mark.parametrize(
    ("end", "status"),
    [(signal.SIGINT, 0), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.full), (b"q", 0), (b"\x1b", 0)],
)
def test_on_a_terminal_it_is_live_and_leaves_that_as_it_was(end, status):
    router = WatchedRouter()
    serving = Serving(router)
    terminal = Terminal(serving.address)
    try:
        terminal.read_until(lambda frame: "decode-0" in frame)
        assert "\x1b[?1049h" in terminal.shown
        assert "STEPS/S" in terminal.shown
        if isinstance(end, bytes):
            terminal.press(b"\x1b[A")  # an arrow key, which is not taken for Esc
        if end is signal.SIGINT:
            terminal.process.send_signal(signal.SIGTSTP)
            terminal.read_until(lambda frame: "\x1b[?1049l" in frame)
            wait_for(lambda: terminal.is_stopped)
            assert terminal.is_restored
            terminal.process.send_signal(signal.SIGCONT)
            terminal.read_until(lambda frame: "decode-0" in frame)
            terminal.resize(40)
            terminal.read_until(lambda frame: "decode-0" in frame and "TOK/S" not in frame)
            terminal.resize(100)
            router.status = grpc.StatusCode.UNAVAILABLE
            serving.stop()
            terminal.read_until(lambda frame: "the figures are old" in frame)
        if isinstance(end, bytes):
            terminal.read_until(lambda frame: "decode-0" in frame)
            assert terminal.process.poll() is None
            terminal.press(end)
        else:
            terminal.process.send_signal(end)
        terminal.read_until(lambda frame: "\x1b[?1049l" in frame)
        assert terminal.process.wait(PATIENCE_SECONDS) == status
        assert terminal.process.stderr.read() == b""
        assert "\x1b[?25h" in terminal.shown  # the cursor
        assert terminal.is_restored
    finally:
        terminal.close()
        router.more.set()
        serving.stop()
