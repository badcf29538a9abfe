"""An engine is built and run in one thread."""

from __future__ import annotations

import asyncio
import threading

import pytest

from outrider.engine.engine_thread import EngineThread

PATIENCE_SECONDS = 30.0


async def test_what_is_built_runs_in_the_thread_that_built_it():
    threads, done = [], threading.Event()

    def build():
        threads.append(threading.current_thread())
        return "parts"

    def run(parts):
        threads.append((threading.current_thread(), parts))
        done.set()

    engine = EngineThread("engine", build=build, run=run, on_failure=lambda _: None)
    assert await engine.build() == "parts"
    assert len(threads) == 1  # `run` is not called before engine.run()
    engine.run()
    assert await asyncio.to_thread(done.wait, PATIENCE_SECONDS)
    assert threads == [threads[0], (threads[0], "parts")]
    engine.join(PATIENCE_SECONDS)


async def test_what_build_raises_comes_out_of_it():
    def build():
        raise ValueError("no weights")

    engine = EngineThread("engine", build=build, run=lambda _: None, on_failure=lambda _: None)
    with pytest.raises(ValueError, match="no weights"):
        await engine.build()


async def test_a_build_that_nobody_waits_for_any_more_ends_quietly():
    may_build = threading.Event()
    engine = EngineThread("engine", build=may_build.wait, run=lambda _: None, on_failure=lambda _: None)
    waiting = asyncio.create_task(engine.build())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    may_build.set()
    engine.join(PATIENCE_SECONDS)
    assert not engine._thread.is_alive()


async def test_an_engine_that_never_ran_ends_when_joined():
    ran = []
    engine = EngineThread("engine", build=lambda: None, run=ran.append, on_failure=lambda _: None)
    await engine.build()
    engine.join(PATIENCE_SECONDS)
    assert ran == []
