"""Measures the cost of `outrider top` to its cluster: tokens per second with and without it, alternately.

    .venv/bin/python benchmarks/top_cost.py [--streams 200] [--pairs 12] [--seconds 10]

A local cluster of the default model decodes as many streams as fit into its batch, without drafts and endlessly; the
other streams wait, so every window has the same work. In half of the windows `top` is stopped (SIGSTOP). `top`
draws on a pseudo terminal of 120 × 40 characters. The terminal's other end is only read, so the cost of a terminal
emulator is excluded.

CPU time is measured, too: that of `top` itself, and the router's per report. The latter is measured on an idle cluster
with 30 watches, each of which gets ten reports per second. The figures in tokens per second do not show the cost of
reports, since a stopped `top` still gets them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median, stdev

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from outrider.bench.machine import describe_machine
from outrider.client import AsyncClient, GenerateOptions
from outrider.cluster.cluster import Cluster
from outrider.cluster.config import ClusterConfig
from outrider.cluster.plan import Launch

SETTLE_SECONDS = 1.0
"""Seconds between the start of a window and the start of its measurement."""
FULL_SECONDS = 30.0
"""Seconds until the batch is full."""
MAX_TOKENS = 6000  # enough that no answer ends
NUM_WATCHES = 30  # the router allows 32 per address
WATCH_SECONDS = 10.0


class Load:
    """Runs `num_streams` streams and counts the tokens that arrive."""

    def __init__(self, client: AsyncClient, num_streams: int) -> None:
        self.num_tokens = 0
        self._client = client
        self._tasks = [asyncio.create_task(self._stream(number)) for number in range(num_streams)]

    async def _stream(self, number: int) -> None:
        options = GenerateOptions(
            temperature=1.0, seed=number, max_tokens=MAX_TOKENS, ignore_eos=True, speculation=False
        )
        async for delta in self._client.generate(f"{number}. Once upon a time", **options):
            self.num_tokens += len(delta.token_ids)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@contextlib.contextmanager
def running_top(target: str) -> Iterator[psutil.Process]:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    command = [sys.executable, "-m", "outrider.cli.main", "top", "--target", target]
    process = subprocess.Popen(command, stdin=slave, stdout=slave, env=os.environ | {"TERM": "xterm-256color"})
    os.close(slave)

    def drain() -> None:
        with contextlib.suppress(OSError):
            while os.read(master, 65536):
                pass

    thread = threading.Thread(target=drain, daemon=True)
    thread.start()
    try:
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(30.0)
        thread.join(30.0)
        os.close(master)


def processor_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


async def measure_window(load: Load, seconds: float) -> float:
    """Returns the tokens per second of one window."""
    started, num_tokens = time.monotonic(), load.num_tokens
    await asyncio.sleep(seconds)
    return (load.num_tokens - num_tokens) / (time.monotonic() - started)


async def seconds_of_a_report(client: AsyncClient, router: psutil.Process) -> float:
    """Returns the router's CPU seconds per report while the router is otherwise idle."""
    num_reports = 0

    async def watch() -> None:
        nonlocal num_reports
        async for _ in client.watch_cluster(interval_seconds=0.1):
            num_reports += 1

    async def spent() -> float:
        before = processor_seconds(router)
        await asyncio.sleep(WATCH_SECONDS)
        return processor_seconds(router) - before

    idle = await spent()
    watches = [asyncio.create_task(watch()) for _ in range(NUM_WATCHES)]
    await asyncio.sleep(1.0)
    first = num_reports
    busy = await spent()
    for task in watches:
        task.cancel()
    await asyncio.gather(*watches, return_exceptions=True)
    return (busy - idle) / (num_reports - first)


async def measure(cluster: Cluster, *, num_streams: int, num_pairs: int, seconds: float) -> None:
    target = cluster.router_address
    router = psutil.Process(next(node.pid for node in cluster.nodes if node.role == "router"))
    async with AsyncClient(target) as client:
        load = Load(client, num_streams)
        shown, alone, shares = [], [], []
        with running_top(target) as top:
            await asyncio.sleep(FULL_SECONDS)
            status = await anext(client.watch_cluster())
            print(f"{status.num_requests_running} running, {status.num_requests_waiting} waiting")
            for window in range(2 * num_pairs):
                is_shown = window % 4 in (1, 2)
                os.kill(top.pid, signal.SIGCONT if is_shown else signal.SIGSTOP)
                await asyncio.sleep(SETTLE_SECONDS)
                before = processor_seconds(top)
                (shown if is_shown else alone).append(await measure_window(load, seconds))
                if is_shown:
                    shares.append((processor_seconds(top) - before) / seconds)
            os.kill(top.pid, signal.SIGCONT)
        await load.stop()
        await asyncio.sleep(5.0)  # waits until nothing is running
        report = await seconds_of_a_report(client, router)
    ratios = [with_it / without for with_it, without in zip(shown, alone, strict=True)]
    spread = stdev(ratios) / num_pairs**0.5
    print("pairs' ratios:", " ".join(f"{ratio:.3f}" for ratio in ratios))
    print(
        f"medians: {median(shown):.1f} tokens/s with top, {median(alone):.1f} without, ratio {median(ratios):.4f};"
        f" mean of ratios {mean(ratios):.4f} ± {spread:.4f} (standard error)"
    )
    num_cores = psutil.cpu_count() or 1
    print(f"top: {mean(shares):.2%} of a core, {mean(shares) / num_cores:.2%} of the machine")
    print(f"router: {report * 1e6:.0f} µs a report, {report / num_cores:.4%} of the machine at one a second")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=10.0)
    arguments = parser.parse_args()
    machine = describe_machine()
    print(f"{machine.processor}, {machine.num_cores} cores, {machine.system}, commit {machine.commit or '?'}")
    with Cluster(ClusterConfig(port=0), Launch()) as cluster:
        asyncio.run(
            measure(cluster, num_streams=arguments.streams, num_pairs=arguments.pairs, seconds=arguments.seconds)
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
