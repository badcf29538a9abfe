"""The machine of a benchmark: its hardware, and the CPU share that other programs took."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from outrider.engine.processor import processor_fields, usable_cpus, within_quota


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineInfo:
    """Facts about the machine that affect the figures."""

    processor: str
    num_cores: int
    memory_bytes: int
    system: str
    python: str
    commit: str  # checked-out commit, with "-dirty" if files have changed; empty outside git


def describe_machine() -> MachineInfo:
    return MachineInfo(
        processor=processor_fields().get("model name") or platform.processor() or platform.machine(),
        num_cores=len(within_quota(usable_cpus())),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        commit=_commit(),
    )


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        result = subprocess.run(  # noqa: S603 a fixed command
            command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.strip()


class CpuMeter:
    """Splits busy CPU time into that of this process and the cluster, and that of other programs. Needs psutil.

    `pids` are processes of the cluster; their descendants count, too. If a process ends before
    `stop`, its CPU time since the start of the measurement counts as another program's.
    """

    def __init__(self, pids: tuple[int, ...]) -> None:
        """Starts measuring."""
        self._pids = (*pids, os.getpid())
        self._started_at = time.monotonic()
        self._busy_seconds = _machine_busy_seconds()
        self._own_seconds = self._read_own()

    def stop(self) -> CpuReading:
        elapsed = max(time.monotonic() - self._started_at, 1e-9)
        busy = _machine_busy_seconds() - self._busy_seconds
        own = sum(seconds - self._own_seconds.get(pid, 0.0) for pid, seconds in self._read_own().items())
        return CpuReading(
            elapsed_seconds=elapsed,
            own_cpu_seconds=own,
            others_cpu_seconds=max(0.0, busy - own),
            num_cores=os.cpu_count() or 1,
        )

    def _read_own(self) -> dict[int, float]:
        """Returns CPU seconds by process id."""
        import psutil

        seconds: dict[int, float] = {}
        for pid in self._pids:
            try:
                root = psutil.Process(pid)
                for process in (root, *root.children(recursive=True)):
                    times = process.cpu_times()
                    seconds[process.pid] = times.user + times.system
            except psutil.Error:  # the process has ended
                continue
        return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuReading:
    """CPU time of one interval."""

    elapsed_seconds: float
    own_cpu_seconds: float
    others_cpu_seconds: float
    num_cores: int


def others_cpu_share(readings: Sequence[CpuReading]) -> float:
    """Returns the share, 0 to 1, of all cores that other programs took over these intervals."""
    available = sum(reading.elapsed_seconds * reading.num_cores for reading in readings)
    return sum(reading.others_cpu_seconds for reading in readings) / available


def _machine_busy_seconds() -> float:
    import psutil

    times = psutil.cpu_times()
    # Guest time is not added, since user time includes it.
    return float(sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq")))


def pids_behind(target: str) -> tuple[int, ...]:
    """Returns the id of the `outrider up` process whose router listens at `target`. All nodes descend from it.

    Returns an empty tuple if the cluster is on another machine or was started in another way, or if the nodes' packages
    are not installed. CPU time cannot be attributed then.
    """
    host, _, port = target.rpartition(":")
    if not port.isdigit() or host not in {"127.0.0.1", "localhost", "[::1]"} or find_spec("psutil") is None:
        return ()
    import psutil

    try:
        listening = [
            connection.pid
            for connection in psutil.net_connections(kind="tcp")
            if connection.status == psutil.CONN_LISTEN
            and connection.laddr
            and connection.laddr[1] == int(port)
            and connection.pid
        ]
        parent = psutil.Process(listening[0]).parent()
        is_cluster = parent is not None and any(Path(word).name == "outrider" for word in parent.cmdline()[:3])
    except (psutil.Error, IndexError):
        return ()
    return (parent.pid,) if parent is not None and is_cluster else ()
