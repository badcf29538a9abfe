"""`outrider top`: shows the cluster on a terminal once a second, as a router reports it (WatchCluster)."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import sys
import termios
import time
import tty
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from outrider.cli.connection import add_connection_arguments, add_target_argument, read_connection
from outrider.cli.top_history import History
from outrider.client import AsyncClient
from outrider.client.targets import Targets
from outrider.errors import AbortedError, CapacityError, InternalError, InvalidRequestError, PeerLostError
from outrider.node import Model

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

    from outrider.cli.top_view import ClusterView

DEFAULT_INTERVAL_SECONDS = 1.0
MIN_INTERVAL_SECONDS, MAX_INTERVAL_SECONDS = 0.1, 60.0
PATIENCE_SECONDS = 5.0
"""Seconds that a report may be overdue before the next router is asked."""
RETRY_SECONDS = 1.0
STDERR = 2
TERMINATED = 128 + signal.SIGTERM
WIDTH_OF_TEXT = 160
"""Maximum width if the output is not a terminal."""

LATE_SECONDS = 1.5
"""Seconds that a report may be overdue before the last figures are marked as old."""

AWAY = (PeerLostError, CapacityError, AbortedError, InternalError)
"""Temporary errors: no router answers, too many watches exist, no answer comes in time, a connection breaks oddly."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--interval",
        type=float,
        default=DEFAULT_INTERVAL_SECONDS,
        metavar="SECONDS",
        help=f"seconds between reports, {MIN_INTERVAL_SECONDS:g} to {MAX_INTERVAL_SECONDS:g}; default %(default)g",
    )
    parser.add_argument("--once", action="store_true", help="print one report as text, for scripts and logs")
    add_target_argument(parser)
    add_connection_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Returns the exit status: 0 after q, Esc or Ctrl-C, 143 after SIGTERM. Raises: OutriderError."""
    interval = arguments.interval
    if not MIN_INTERVAL_SECONDS <= interval <= MAX_INTERVAL_SECONDS:
        limits = f"{MIN_INTERVAL_SECONDS:g} to {MAX_INTERVAL_SECONDS:g}"
        raise InvalidRequestError(f"--interval {interval:g} is not {limits}", field="interval")
    is_terminal = sys.stdout.isatty()
    if not is_terminal and not arguments.once:
        raise InvalidRequestError("the output is not a terminal: use --once", field="once")
    console = _make_console(is_terminal=is_terminal)
    cluster = WatchedCluster(arguments.target, interval_seconds=interval, **read_connection(arguments))
    try:
        asyncio.run(_print(cluster, console) if arguments.once else _show(cluster, console))
    except KeyboardInterrupt:
        if arguments.once:
            raise
    except asyncio.CancelledError:
        return TERMINATED
    return 0


def _make_console(*, is_terminal: bool) -> Console:
    """Makes the console. Raises: ModuleNotFoundError without rich."""
    from rich.console import Console

    if is_terminal:
        return Console(highlight=False)
    return Console(highlight=False, force_terminal=False, color_system=None, width=WIDTH_OF_TEXT)


class WatchedCluster:
    """The reports of a router. If there are several targets, it watches one that answers."""

    def __init__(self, targets: str, *, interval_seconds: float, **connection: Any) -> None:
        """`connection`: further arguments of the client. Raises: ValueError if there is no target."""
        self._targets = Targets(targets)
        self.interval_seconds = interval_seconds
        self._connection = connection
        self._model: Model | None = None
        self._error = ""
        self._history = History()
        self.changed = asyncio.Event()

    async def follow(self) -> None:
        """Takes reports until cancelled. Raises: OutriderError for permanent errors, such as an unknown token."""
        while True:
            try:
                async with aclosing(self._reports()) as reports:
                    async for _ in reports:
                        self.changed.set()
            except AWAY as error:
                self._error = error.message
            self._targets.current = self._targets.after(self._targets.current)
            self.changed.set()
            await asyncio.sleep(RETRY_SECONDS)

    async def take_one(self) -> None:
        """Takes one report of the first target that answers. Raises: the last target's OutriderError if all fail."""
        while True:
            try:
                async with aclosing(self._reports()) as reports:
                    await anext(reports)
            except AWAY:
                self._targets.current = self._targets.after(self._targets.current)
                if self._targets.current == self._targets.all[0]:
                    raise
            else:
                return

    async def _reports(self) -> AsyncGenerator[None, None]:
        """Yields after each report is added to the history. Always ends with an OutriderError, unless it is closed."""
        target, interval = self._targets.current, self.interval_seconds
        has_model = False
        async with (
            AsyncClient(target, **self._connection) as client,
            aclosing(client.watch_cluster(interval_seconds=interval)) as reports,
        ):
            self._history.change_router()
            while True:
                try:
                    async with asyncio.timeout(interval + PATIENCE_SECONDS):
                        status = await anext(reports, None)
                except TimeoutError as error:
                    raise PeerLostError(f"{target} does not answer", node=target) from error
                if status is None:
                    raise PeerLostError(f"{target} has ended its reports", node=target)
                if not has_model:
                    with suppress(*AWAY):  # the router has no model until a node is serving
                        self._model = await client.model()
                        has_model = True
                self._error = ""
                self._history.add(status, time.monotonic())
                yield

    def view(self) -> ClusterView:
        from outrider.cli.top_view import ClusterView

        target, number = self._targets.current, self._targets.all.index(self._targets.current) + 1
        age = time.monotonic() - self._history.at
        error = self._error
        if not error and self._history.status is not None and age > self.interval_seconds + LATE_SECONDS:
            error = f"{target} does not answer"
        named = f"{target} ({number} of {len(self._targets)})" if len(self._targets) > 1 else target
        return ClusterView(self._history, named, self._model, error, age)


async def _print(cluster: WatchedCluster, console: Console) -> None:
    await cluster.take_one()
    console.print(cluster.view(), soft_wrap=not console.is_terminal)


@contextmanager
def _without_stderr() -> Iterator[None]:
    """Silences stderr, since gRPC's C core would write across the screen. Exceptions are reported afterwards."""
    kept, nowhere = os.dup(STDERR), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, STDERR)
    try:
        yield
    finally:
        os.dup2(kept, STDERR)
        os.close(kept)
        os.close(nowhere)


def _mode() -> list[Any] | None:
    """Returns the mode of the terminal that keys come from; None if standard input is no terminal."""
    return termios.tcgetattr(sys.stdin) if sys.stdin.isatty() else None


def _set_mode(mode: list[Any] | None) -> None:
    if mode is not None:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, mode)


def _pause(live: Live, mode: list[Any] | None) -> None:
    """Handles Ctrl-Z: the shell gets the terminal back in `mode`."""
    own = _mode()
    live.stop()
    _set_mode(mode)
    os.kill(os.getpid(), signal.SIGSTOP)
    _set_mode(own)
    live.start()


def _read_key(leave: Callable[[], object]) -> None:
    """Reads keys, several of which may arrive together; arrows begin with Esc and are ignored."""
    keys = re.sub(rb"\x1b[\[O][0-9;]*[A-Za-z~]", b"", os.read(sys.stdin.fileno(), 64))
    if not {b"q"[0], b"Q"[0], b"\x1b"[0]}.isdisjoint(keys):
        leave()


async def _show(cluster: WatchedCluster, console: Console) -> None:
    """Shows the cluster until cancelled, and then restores the terminal."""
    from rich.live import Live

    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    loop.add_signal_handler(signal.SIGWINCH, cluster.changed.set)
    mode = _mode()
    following = asyncio.create_task(cluster.follow())
    following.add_done_callback(lambda _: cluster.changed.set())
    try:
        with _without_stderr(), Live(console=console, screen=True, auto_refresh=False) as live:
            loop.add_signal_handler(signal.SIGTSTP, _pause, live, mode)
            if mode is not None:
                tty.setcbreak(sys.stdin, termios.TCSANOW)
                loop.add_reader(sys.stdin, _read_key, following.cancel)
            while not following.done():
                cluster.changed.clear()
                live.update(cluster.view(), refresh=True)
                with suppress(TimeoutError):  # without a report, the figures are redrawn as old
                    async with asyncio.timeout(cluster.interval_seconds + LATE_SECONDS):
                        await cluster.changed.wait()
    finally:
        _set_mode(mode)
        following.cancel()
        await asyncio.wait({following})
    if not following.cancelled():  # a key press cancels the task; otherwise the task has failed
        following.result()
