"""What a node's KV may take of a device's memory; free main memory, within the control groups of this process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from outrider.engine.control_groups import GROUPS, MEMBERSHIP, control_groups
from outrider.engine.device import device_type

CPU_SHARE, GPU_SHARE = 0.2, 0.92
"""By default: main memory has other users; of a GPU, as in vLLM, a part is left for what nobody measures, such as
samplers, heads and fragmentation."""
COMFORTABLE_WINDOWS = 2
"""For which a share of main memory is exceeded while there is some: the longest request then leaves room for others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVRoom:
    """How much of a device's memory KV may take."""

    free_bytes: int  # nobody has them, and this process's steps will not take them
    whole_bytes: int  # what a share is of: free main memory, or all memory of a GPU
    own_bytes: int = 0  # of its share, the process takes them otherwise: for weights, steps and the driver
    default_share: float = CPU_SHARE
    num_windows: int = COMFORTABLE_WINDOWS  # for which a share is exceeded; 0 where others count on theirs

    @classmethod
    def of(cls, device: str, reserved_bytes: int = 0) -> KVRoom:
        """As it is now. `reserved_bytes`: what this process will take besides."""
        free_bytes = max(free_memory_bytes(device) - reserved_bytes, 0)
        if device_type(device) == "cpu":
            return cls(free_bytes=free_bytes, whole_bytes=free_bytes)
        import torch

        from outrider.engine.gpu_memory import used_bytes

        whole, own = torch.cuda.mem_get_info(device)[1], used_bytes(device) + reserved_bytes
        return cls(free_bytes=free_bytes, whole_bytes=whole, own_bytes=own, default_share=GPU_SHARE, num_windows=0)

    def share(self, fraction: float | None) -> int:
        """Bytes for KV in this share of the memory. None: the default one."""
        part = int(self.whole_bytes * (fraction or self.default_share)) - self.own_bytes
        return max(min(part, self.free_bytes), 0)


def free_memory_bytes(device: str) -> int:
    """Bytes that may still be allocated: of the GPU, by anybody, or of this machine within the process's limits."""
    if device_type(device) == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    return free_main_memory_bytes()


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
