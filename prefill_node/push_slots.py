"""The limit of prefill jobs whose KV is pushed, shared fairly among the decode nodes."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Iterator

from prefill_node.task import PrefillTask


class PushSlots:
    """At most `max_pushes` jobs are computed or pushed; the others wait, by priority, then by arrival.

    A decode node gets a further slot only while it holds fewer slots than are free (dynamic thresholds: Choudhury and
    Hahne, 1998). So a decode node that receives nothing holds at most half of the slots, and two such nodes at most a
    third each. Owned by the engine thread.
    """

    def __init__(self, max_pushes: int) -> None:
        self._max_pushes = max_pushes
        self._num_taken: Counter[str] = Counter()  # by KV address
        self._waiting: dict[str, list[tuple[int, int, PrefillTask]]] = {}  # by KV address, in order
        self.num_waiting = 0
        """Number of waiting tasks. Readable from any thread."""

    def add(self, task: PrefillTask) -> None:
        """Adds a task, which waits until `take` yields it."""
        bisect.insort(self._waiting.setdefault(task.job.call.kv_address, []), _entry(task))
        self.num_waiting += 1

    def take(self, may_start: Callable[[PrefillTask], bool] = lambda _task: True) -> Iterator[PrefillTask]:
        """Yields the tasks that get a slot. Each holds its slot until `leave` is called.

        A task that may not start now is passed by.
        """
        while True:
            num_free = self._max_pushes - self._num_taken.total()
            heads = [
                next((entry for entry in waiting if may_start(entry[2])), None)
                for address, waiting in self._waiting.items()
                if self._num_taken[address] < num_free
            ]
            task = min(filter(None, heads), default=(0, 0, None))[2]
            if task is None:
                return
            self._remove(task)
            task.has_slot = True
            self._num_taken[task.job.call.kv_address] += 1
            yield task

    def leave(self, task: PrefillTask) -> None:
        """Removes a task that has ended or was cancelled."""
        if not task.has_slot:
            self._remove(task)
            return
        address = task.job.call.kv_address
        self._num_taken[address] -= 1
        if not self._num_taken[address]:
            del self._num_taken[address]

    def _remove(self, task: PrefillTask) -> None:
        waiting = self._waiting[task.job.call.kv_address]
        waiting.remove(_entry(task))
        if not waiting:
            del self._waiting[task.job.call.kv_address]
        self.num_waiting -= 1


def _entry(task: PrefillTask) -> tuple[int, int, PrefillTask]:
    return -task.job.call.options.priority, task.job.job_id, task
