"""The control groups that bound this process, of both versions, as Linux shows them in files. Torch-free."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def control_groups(
    controller: str, *, groups: Path = GROUPS, membership: Path = MEMBERSHIP
) -> Iterator[tuple[int, Path]]:
    """(version, folder) of each group of this process where that controller may set a bound; none but on Linux.

    A container sees its own group as the root of the hierarchy, under another name than the host's: folders may not be
    there.
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
    """Whole processors whose time the strictest group allows, at least one; None: as many as there are."""
    bounds = []
    for version, folder in control_groups("cpu", groups=groups, membership=membership):
        with contextlib.suppress(OSError, ValueError):  # no such group, or it says "max"
            if version == 2:
                quota, period = map(int, (folder / "cpu.max").read_text().split())
            else:
                quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
            if quota > 0:  # -1: no bound
                bounds.append(max(1, quota // period))
    return min(bounds, default=None)
