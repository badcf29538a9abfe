"""Waiting for other threads and tasks."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

PATIENCE_SECONDS = 60.0
"""Seconds that tests wait for an event that takes milliseconds on an idle machine."""

Result = TypeVar("Result")


def wait_for(condition: Callable[[], object]) -> None:
    """Returns once another thread has made the condition true, and fails if that takes too long."""
    pause, deadline = threading.Event(), time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"not in {PATIENCE_SECONDS:g} s: {condition}"
        pause.wait(0.002)


async def until(condition: Callable[[], object]) -> None:
    """Returns once another task has made the condition true, and fails if that takes too long."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():
            await asyncio.sleep(0.002)


async def within(awaitable: Awaitable[Result]) -> Result:
    """Returns the awaitable's result, and fails if that takes too long."""
    return await asyncio.wait_for(awaitable, PATIENCE_SECONDS)
