"""How much of the main memory this process may still take: the machine's, and its control groups' limits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import psutil

GROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def free_main_memory_bytes(*, groups: Path = GROUPS, membership: Path = MEMBERSHIP) -> int:
    """The least of what is available on the machine and what each control group above this process leaves."""
    available: int = psutil.virtual_memory().available
    return max(0, min([available, *_left_in_groups(groups, membership)]))


def _left_in_groups(groups: Path, membership: Path) -> Iterator[int]:
    """Bytes left in each group that has a limit, of both versions of control groups.

    A container sees its own group as the root of the hierarchy, whatever name the host
    has for it: names that are not there are passed over.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            root, limit, usage, cache = groups, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root = groups / "memory"
            limit, usage, cache = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        group = root / name.strip("/")
        for folder in (group, *group.parents):
            with contextlib.suppress(OSError, ValueError, KeyError):  # no such group, or it says "max"
                bound = int((folder / limit).read_text())
                used = int((folder / usage).read_text())
                rows = (row.split() for row in (folder / "memory.stat").read_text().splitlines())
                yield bound - used + int(dict(rows)[cache])  # the page cache of files makes room where it is needed
            if folder == root:
                break
