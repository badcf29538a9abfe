"""Measures how long services take to start, each alone and all together by `outrider up`, and their memory afterwards.

    .venv/bin/python benchmarks/startup.py --rounds 5

Times are from the start of the process. Proportional set sizes (PSS) divide a page among the
processes that map it; resident set sizes (RSS) count it in each. Core seconds are the CPU time
that the services had used once they were serving; other programs affect this figure least.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from outrider.bench.machine import describe_machine
from outrider.service.announce import ANNOUNCE_VARIABLE

ROLES = ("router", "prefill_node", "decode_node", "draft_node")
END_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Usage:
    """Resources that processes have used so far."""

    core_seconds: float
    rss: float  # MiB
    pss: float  # MiB

    @classmethod
    def of(cls, processes: list[psutil.Process]) -> Usage:
        times = [process.cpu_times() for process in processes]
        infos = [process.memory_full_info() for process in processes]
        return cls(
            sum(time.user + time.system + time.children_user + time.children_system for time in times),
            sum(info.rss for info in infos) / 2**20,
            sum(info.pss for info in infos) / 2**20,
        )


@dataclass(frozen=True, slots=True)
class Start:
    listening: float  # seconds
    serving: float
    usage: Usage


def start_role(role: str) -> Start:
    """Starts one service alone, without peers."""
    reading, writing = os.pipe()
    started = time.monotonic()
    command = [sys.executable, "-m", role, "--set", "server.port=0"]
    if role == "router":
        command += ["--set", "router.prefill_targets=127.0.0.1:1", "--set", "router.decode_targets=127.0.0.1:1"]
    process = subprocess.Popen(
        command,
        env=os.environ | {ANNOUNCE_VARIABLE: str(writing)},
        pass_fds=(writing,),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(writing)
    listening = serving = float("nan")
    usage = Usage(0, 0, 0)
    try:
        for said in announcements(reading):
            if "address" in said and not said.get("serving"):
                listening = time.monotonic() - started
            if said.get("serving") or (role == "router" and "address" in said):  # without nodes, a router only listens
                serving = time.monotonic() - started
                usage = Usage.of([psutil.Process(process.pid)])
                break
    finally:
        os.close(reading)
        process.send_signal(signal.SIGTERM)
        process.wait(END_SECONDS)
    return Start(listening, serving, usage)


def announcements(descriptor: int) -> Iterator[dict[str, object]]:
    with os.fdopen(os.dup(descriptor), encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def start_all() -> Start:
    """Runs `outrider up` until it prints "serving on"."""
    started = time.monotonic()
    command = [sys.executable, "-m", "outrider.cli.main", "up", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    listening = serving = float("nan")
    usage = Usage(0, 0, 0)
    try:
        for line in process.stdout:
            if line.startswith("router") and "listening" in line:
                listening = time.monotonic() - started
            if line.startswith("serving on"):
                serving = time.monotonic() - started
                supervisor = psutil.Process(process.pid)
                usage = Usage.of([supervisor, *supervisor.children(recursive=True)])
                break
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(END_SECONDS)
    return Start(listening, serving, usage)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--what", default=",".join(("up", *ROLES)), help="up and roles, with commas between")
    arguments = parser.parse_args()
    machine = describe_machine()
    print(f"{machine.processor}, {machine.num_cores} cores, {machine.system}, commit {machine.commit or '?'}")
    names = arguments.what.split(",")
    starts: dict[str, list[Start]] = {name: [] for name in names}
    for _ in range(arguments.rounds):
        for name in names:
            starts[name].append(start_all() if name == "up" else start_role(name))
    print(f"{'':14}{'listening s':>18}{'serving s':>18}{'core s':>18}{'RSS MiB':>10}{'PSS MiB':>10}")
    for name, found in starts.items():
        times = [
            [start.listening for start in found],
            [start.serving for start in found],
            [start.usage.core_seconds for start in found],
        ]
        rss, pss = median(start.usage.rss for start in found), median(start.usage.pss for start in found)
        words = "".join(f"{in_words(values):>18}" for values in times)
        print(f"{name:14}{words}{rss:>10.0f}{pss:>10.0f}", flush=True)
    return 0


def in_words(seconds: list[float]) -> str:
    """Formats the median of `seconds`, with minimum and maximum in brackets."""
    return f"{median(seconds):.2f} ({min(seconds):.2f}–{max(seconds):.2f})"


if __name__ == "__main__":
    sys.exit(main())
