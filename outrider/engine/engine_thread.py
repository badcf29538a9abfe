"""The one thread of a process that computes: it builds the engine, then runs it. Torch-free."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

Parts = TypeVar("Parts")


class EngineThread(Generic[Parts]):
    """`build` and then `run` in one thread.

    OpenMP keeps a pool of threads for each thread that has ever computed in parallel. Once the pools together have more
    threads than there are cores, threads sleep at every barrier instead of spinning, and a decode step takes twice as
    long. So models are loaded and warmed up in the thread that runs steps, and no other thread may use torch on
    anything large.
    """

    def __init__(
        self,
        name: str,
        *,
        build: Callable[[], Parts],
        run: Callable[[Parts], None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        """`on_failure` is called from the thread when `run` raises: a bug of ours."""
        self._build = build
        self._run = run
        self._on_failure = on_failure
        self._may_run = threading.Event()
        self._is_given_up = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._built: Future[Parts] = Future()

    async def build(self) -> Parts:
        """Starts the thread; returns what it has built. It runs only when told to. Raises: what `build` raised."""
        self._built.set_running_or_notify_cancel()  # whoever stops waiting does not cancel it
        self._thread.start()
        return await asyncio.wrap_future(self._built)

    def run(self) -> None:
        """Lets the built engine run."""
        self._may_run.set()

    def join(self, timeout_seconds: float) -> None:
        """Waits for `run` to return, which its caller has arranged. An engine that was not started ends at once."""
        if not self._may_run.is_set():
            self._is_given_up = True
            self._may_run.set()
        self._thread.join(timeout_seconds)

    def _work(self) -> None:
        try:
            parts = self._build()
        except Exception as error:  # noqa: BLE001 the border of the thread: `build` raises it
            self._built.set_exception(error)
            return
        self._built.set_result(parts)
        self._may_run.wait()
        if self._is_given_up:
            return
        try:
            self._run(parts)
        except Exception as error:  # noqa: BLE001 the same
            self._on_failure(error)
