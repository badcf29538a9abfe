"""Reads from the file system which Linux control groups, v1 and v2, limit this process. Torch-free."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def control_groups(
    controller: str, *, groups: Path = GROUPS, membership: Path = MEMBERSHIP
) -> Iterator[tuple[int, Path]]:
    """Yields (version, folder) of each group of this process that may set a limit for the controller. Yields nothing on
    systems other than Linux.

    Inside a container, the container's group is the root of the hierarchy and does not have the same name as on the
    host, so a yielded folder may not exist.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            version, root = 2, groups
        elif controller in controllers.split(","):
            version, root = 1, groups / controller
        else:
            continue
        group = root / name.strip("/")
        for folder in (group, *group.parents):
            yield version, folder
            if folder == root:
                break


def cpu_quota(*, groups: Path = GROUPS, membership: Path = MEMBERSHIP) -> int | None:
    """Returns the strictest CPU quota in whole processors, at least 1, or None if there is no limit."""
    bounds = []
    for version, folder in control_groups("cpu", groups=groups, membership=membership):
        with contextlib.suppress(OSError, ValueError):  # no such group, or the limit is "max"
            if version == 2:
                quota, period = map(int, (folder / "cpu.max").read_text().split())
            else:
                quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
            if quota > 0:  # -1: no limit
                bounds.append(max(1, quota // period))
    return min(bounds, default=None)
