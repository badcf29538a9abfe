"""The only compute thread of a process: it builds the engine, then runs it. Torch-free."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

Parts = TypeVar("Parts")


class EngineThread(Generic[Parts]):
    """A thread that runs `build` and then `run`.

    OpenMP keeps a thread pool for each thread that has ever computed in parallel. Once the pools together have more
    threads than there are cores, threads sleep at barriers instead of spinning, and a decode step takes twice as long.
    So models are loaded and warmed up in the thread that runs steps, and no other thread may use torch on large
    tensors.
    """

    def __init__(
        self,
        name: str,
        *,
        build: Callable[[], Parts],
        run: Callable[[Parts], None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        """`on_failure` is called in the engine thread if `run` raises, which is a bug."""
        self._build = build
        self._run = run
        self._on_failure = on_failure
        self._may_run = threading.Event()
        self._is_given_up = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._built: Future[Parts] = Future()

    async def build(self) -> Parts:
        """Starts the thread, which builds the engine, and returns the engine. No steps run before `run` is called.

        Raises: any error of the constructor's `build`.
        """
        self._built.set_running_or_notify_cancel()  # a cancelled waiter does not cancel the build
        self._thread.start()
        return await asyncio.wrap_future(self._built)

    def run(self) -> None:
        """Starts running the built engine."""
        self._may_run.set()

    def join(self, timeout_seconds: float) -> None:
        """Waits until the constructor's argument `run` returns. The caller must already have told it to end.

        An engine that was never told to run ends at once.
        """
        if not self._may_run.is_set():
            self._is_given_up = True
            self._may_run.set()
        self._thread.join(timeout_seconds)

    def _work(self) -> None:
        try:
            parts = self._build()
        except Exception as error:  # noqa: BLE001 thread boundary: the coroutine `build` raises it
            self._built.set_exception(error)
            return
        self._built.set_result(parts)
        self._may_run.wait()
        if self._is_given_up:
            return
        try:
            self._run(parts)
        except Exception as error:  # noqa: BLE001 thread boundary
            self._on_failure(error)
