"""Free main memory, within the machine and the control groups of this process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import psutil

from outrider.engine.control_groups import GROUPS, MEMBERSHIP, control_groups


def free_main_memory_bytes(
    *, groups: Path = GROUPS, membership: Path = MEMBERSHIP, mapped_bytes: int | None = None
) -> int:
    """The least of what is available on the machine and below the limit of each control group of this process.

    The system counts all pages of files as reclaimable. Those that this process maps, above all its weights, are read
    in every step and do not count as free here. `mapped_bytes`: how much of them is resident; by default as the system
    says.
    """
    mapped = int(psutil.Process().memory_info().shared) if mapped_bytes is None else mapped_bytes
    available: int = psutil.virtual_memory().available - mapped
    return max(0, min([available, *_left_in_groups(groups, membership, mapped)]))


def _left_in_groups(groups: Path, membership: Path, mapped: int) -> Iterator[int]:
    """Bytes left in each group that has a limit."""
    for version, folder in control_groups("memory", groups=groups, membership=membership):
        limit, usage, prefix = (
            ("memory.max", "memory.current", "")
            if version == 2
            else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        )
        with contextlib.suppress(OSError, ValueError, KeyError):  # no such group, or it says "max"
            bound = int((folder / limit).read_text())
            used = int((folder / usage).read_text())
            rows = dict(row.split() for row in (folder / "memory.stat").read_text().splitlines())
            inactive, active = (int(rows[f"{prefix}{kind}_file"]) for kind in ("inactive", "active"))
            # Page cache is reclaimed when memory is needed, except what is mapped here.
            yield bound - used + min(inactive, max(0, inactive + active - mapped))
