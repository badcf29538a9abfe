"""The event loop's side of the jobs: numbers them, bounds them, and waits for their ends."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence

from outrider.errors import CapacityError, OutriderError, PeerLostError
from outrider.prefill import PrefillCall, PrefillFigures
from prefill_node.jobs import CancelJob, Command, JobEnded, PrefillJob


class PendingJobs:
    """Jobs in work, by id. Lives on the event loop."""

    def __init__(self, *, submit: Callable[[Command], None], max_jobs: int) -> None:
        self._submit = submit
        self._max_jobs = max_jobs
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[PrefillFigures]] = {}
        self._is_draining = False

    @property
    def num_jobs(self) -> int:
        return len(self._waiting)

    async def run(self, call: PrefillCall) -> PrefillFigures:
        """One job, from queue to commit; cancelling this stops computation and push.

        Raises: PeerLostError (draining), CapacityError (queue full), and what ended the job.
        """
        if self._is_draining:
            raise PeerLostError("the prefill node is draining", reason="DRAINING")
        if len(self._waiting) >= self._max_jobs:
            raise CapacityError(f"{self._max_jobs} prompts are in work or waiting already")
        job = PrefillJob(next(self._ids), call)
        future: asyncio.Future[PrefillFigures] = asyncio.get_running_loop().create_future()
        self._waiting[job.job_id] = future
        self._submit(job)
        try:
            return await future
        finally:
            if self._waiting.pop(job.job_id, None) is not None:  # no end has come: nobody waits for it any more
                self._submit(CancelJob(job.job_id))

    def deliver(self, ended: Sequence[JobEnded]) -> None:
        for end in ended:
            future = self._waiting.pop(end.job_id, None)
            if future is None or future.done():
                continue
            if isinstance(end.result, OutriderError):
                future.set_exception(end.result)
            else:
                future.set_result(end.result)

    def fail_all(self, error: OutriderError) -> None:
        """The engine is gone: nothing else will end these."""
        self.deliver([JobEnded(job_id, error) for job_id in self._waiting])

    def start_draining(self) -> None:
        """No new jobs."""
        self._is_draining = True

    async def wait_until_idle(self) -> None:
        while self._waiting:
            await asyncio.wait(list(self._waiting.values()))
