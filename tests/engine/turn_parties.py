"""Processes that take turns. They do not import pytest, so that they start quickly."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import signal
import time

from outrider.engine.cpu_kernels.library import KernelLibrary
from outrider.engine.cpu_turns import CpuTurns, SharedTurns

PATIENCE_SECONDS = 60.0
# Seconds of a wait that must not time out, or of a lease that must not expire. Leases are limited to ten seconds.
LONG = 30.0


class Party:
    """A process with a slot, which runs the calls that a test sends it, and answers in their order."""

    def __init__(self, library_file, turns_file, min_lease_seconds):
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(
            target=run_party, args=(other, library_file, turns_file, min_lease_seconds), daemon=True
        )
        self._process.start()
        other.close()
        assert self.answer() == "joined"

    def ask(self, *call):
        self._pipe.send(call)

    def answer(self):
        assert self._pipe.poll(PATIENCE_SECONDS), "no answer"
        return self._pipe.recv()

    def has_answered(self, *, within):
        return self._pipe.poll(within)

    def told(self, *call):
        self.ask(*call)
        return self.answer()

    def take(self, seconds=0.0):
        return self.told("take", seconds)

    def keep(self, seconds=0.0):
        return self.told("keep", seconds)

    def is_over(self, seconds=0.0):
        return self.told("is_over", seconds)

    def give(self):
        assert self.told("give") is None

    def num_taken_from_others(self):
        return self.told("num_taken_from_others")

    def stop(self):
        """Stops the process, and returns when it has stopped."""
        os.kill(self._process.pid, signal.SIGSTOP)
        _, status = os.waitpid(self._process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)

    def go_on(self):
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self):
        self._process.kill()
        self._process.join(PATIENCE_SECONDS)
        self._pipe.close()


def run_party(pipe, library_file, turns_file, min_lease_seconds):
    num_taken = 0

    def count():
        nonlocal num_taken
        num_taken += 1

    turns = SharedTurns(
        KernelLibrary(library_file),
        turns_file,
        min_lease_seconds=min_lease_seconds,
        on_turn_taken_over=count,
    )
    pipe.send("joined")
    while True:
        name, *arguments = pipe.recv()
        pipe.send(num_taken if name == "num_taken_from_others" else getattr(turns, name)(*arguments))


def look_twice(number, library_file, turns_file, shared, start, results):
    turns = CpuTurns()
    if library_file is not None:
        turns = SharedTurns(KernelLibrary(library_file), turns_file, min_lease_seconds=LONG)
    num_met = 0
    with shared.open("r+b") as file, mmap.mmap(file.fileno(), 4096) as memory:
        start.wait(PATIENCE_SECONDS)
        for _ in range(1000):
            assert turns.take(LONG)
            memory[0] = number
            time.sleep(1e-5)  # so that other processes run
            num_met += memory[0] != number
            turns.give()
    results.put(num_met)
