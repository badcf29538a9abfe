"""Sends prompts, closed loop or open loop, and records the timing of each answer."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from outrider.bench.prompts import AnswerOptions, BenchPrompt
from outrider.client import AsyncClient, RequestMetrics, Summary, Usage
from outrider.errors import OutriderError


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """The load: `value` clients (closed loop) or `value` requests per second (open loop)."""

    is_open_loop: bool
    value: float

    @property
    def name(self) -> str:
        return f"{self.value:g}/s" if self.is_open_loop else f"{self.value:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One answer as the client saw it. Times are seconds of the monotonic clock."""

    prompt_id: str
    kind: str
    sent_at: float
    finished_at: float
    token_times: tuple[tuple[float, int], ...] = ()  # (arrival of a delta, number of its tokens)
    token_ids: tuple[int, ...] = ()  # of sample 0
    error: str = ""  # the error's reason; empty if answered
    error_message: str = ""
    usage: Usage = field(default_factory=Usage)
    metrics: RequestMetrics = field(default_factory=RequestMetrics)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all samples."""
        return sum(count for _, count in self.token_times)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Records of prompts that were sent together, and the time that all of them took."""

    records: tuple[RequestRecord, ...]
    wall_seconds: float


_NO_SUMMARY = Summary(request_id="", usage=Usage(), metrics=RequestMetrics())

OnDone = Callable[[RequestRecord], None]


class AnswerSource(Protocol):
    """Requests one answer from a server. `benchmarks/peers` has sources for other servers."""

    async def ask(self, prompt: BenchPrompt, *, index: int, speculation: bool) -> RequestRecord:
        """Returns a record of the answer. A failed answer gives a record with `error`, never an exception."""


class LoadGenerator:
    """Sends load to one server through `asker`. Not thread-safe: it belongs to one event loop."""

    def __init__(self, asker: AnswerSource, *, seed: int = 0) -> None:
        """`seed` is for open-loop arrivals."""
        self._asker = asker
        self._seed = seed

    async def run(
        self, prompts: Sequence[BenchPrompt], level: Level, *, speculation: bool, on_done: OnDone = lambda _: None
    ) -> Pass:
        """Sends every prompt once. A failed answer gives a record with `error`, never an exception."""
        started_at = time.monotonic()
        if level.is_open_loop:
            records = await self._open_loop(prompts, level.value, speculation=speculation, on_done=on_done)
        else:
            records = await self._closed_loop(prompts, int(level.value), speculation=speculation, on_done=on_done)
        return Pass(records=tuple(records), wall_seconds=time.monotonic() - started_at)

    async def _closed_loop(
        self, prompts: Sequence[BenchPrompt], num_clients: int, *, speculation: bool, on_done: OnDone
    ) -> list[RequestRecord]:
        """Runs clients, each of which sends its next prompt when its previous answer has ended."""
        waiting = iter(enumerate(prompts))
        records: dict[int, RequestRecord] = {}

        async def client() -> None:
            for index, prompt in waiting:
                records[index] = await self._asker.ask(prompt, index=index, speculation=speculation)
                on_done(records[index])

        async with asyncio.TaskGroup() as group:
            for _ in range(min(num_clients, len(prompts))):
                group.create_task(client())
        return [records[index] for index in sorted(records)]

    async def _open_loop(
        self, prompts: Sequence[BenchPrompt], rate: float, *, speculation: bool, on_done: OnDone
    ) -> list[RequestRecord]:
        """Sends requests at Poisson arrival times, which are the same in every run. Late answers delay no request."""
        gaps = random.Random(self._seed)  # noqa: S311 arrivals, not secrets

        async def client(index: int, prompt: BenchPrompt) -> RequestRecord:
            record = await self._asker.ask(prompt, index=index, speculation=speculation)
            on_done(record)
            return record

        tasks: list[asyncio.Task[RequestRecord]] = []
        due = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for index, prompt in enumerate(prompts):
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                tasks.append(group.create_task(client(index, prompt)))
                due += gaps.expovariate(rate)
        return [task.result() for task in tasks]


class RouterAnswerSource:
    """Asks a router. It belongs to one event loop."""

    def __init__(self, client: AsyncClient, options: AnswerOptions) -> None:
        self._client = client
        self._options = options

    async def ask(self, prompt: BenchPrompt, *, index: int, speculation: bool) -> RequestRecord:
        message = prompt.to_message(self._options, index=index, speculation=speculation)
        stream = self._client.generate_message(message, timeout_seconds=self._options.timeout_seconds)
        sent_at = time.monotonic()
        token_times: list[tuple[float, int]] = []
        try:
            async with stream:
                async for delta in stream:
                    if delta.token_ids:
                        token_times.append((time.monotonic(), len(delta.token_ids)))  # noqa: PERF401 events before an error count
        except OutriderError as failure:
            error, error_message = failure.reason, str(failure)
        else:
            error, error_message = ("", "") if stream.is_complete else ("NO_SUMMARY", "the answer ended without one")
        summary = stream.summary if stream.is_complete else _NO_SUMMARY
        return RequestRecord(
            prompt_id=prompt.id,
            kind=prompt.kind,
            sent_at=sent_at,
            finished_at=time.monotonic(),
            token_times=tuple(token_times),
            token_ids=stream.token_ids(),
            error=error,
            error_message=error_message,
            usage=summary.usage,
            metrics=summary.metrics,
        )
