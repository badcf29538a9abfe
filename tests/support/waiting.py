"""Waiting for what another thread or task is about to do."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

PATIENCE_SECONDS = 60.0
"""What is waited for comes in milliseconds; a busy machine may take its time."""

Result = TypeVar("Result")


def wait_for(condition: Callable[[], object]) -> None:
    """Returns once the condition holds; fails when it does not in time. For what another thread does."""
    pause, deadline = threading.Event(), time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"not in {PATIENCE_SECONDS:g} s: {condition}"
        pause.wait(0.002)


async def until(condition: Callable[[], object]) -> None:
    """Returns once the condition holds; fails when it does not in time. For what another task does."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():
            await asyncio.sleep(0.002)


async def within(awaitable: Awaitable[Result]) -> Result:
    """What it returns; fails when it does not in time."""
    return await asyncio.wait_for(awaitable, PATIENCE_SECONDS)
