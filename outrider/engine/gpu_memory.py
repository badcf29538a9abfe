"""One GPU and several processes: what this process has of its memory, and whose turn it is to load a model there."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from outrider.cache_directory import locked, user_cache_directory
from outrider.engine.device import device_type

CONTEXT_BYTES = 600 << 20
"""What the driver takes for a process: context, code, workspaces of libraries. Estimated, where NVML does not tell."""
TURN_SECONDS = 600.0
"""For those before this process to load their models. Memory is measured by process, so it may then go on beside them.
"""


def used_bytes(device: str) -> int:
    """Bytes of the GPU that this process has, whatever others take or free meanwhile: in torch's pools, and others."""
    import torch

    return torch.cuda.memory_reserved(device) + (driver_bytes(device) or CONTEXT_BYTES)


def driver_bytes(device: str) -> int | None:
    """What this process has beside torch's pools: the context, graphs. None where NVML (nvidia-ml-py) does not tell.

    In a container it may not: it knows processes by their numbers on the machine.
    """
    import torch

    with contextlib.suppress(Exception):  # no package, no permission, a device that it does not know
        told = re.search(rf"process +{os.getpid()} uses +([0-9.]+) MB", torch.cuda.list_gpu_processes(device))
        others = int(float(told[1] if told else 0) * (1 << 20)) - torch.cuda.memory_reserved(device)
        return others if others > 0 else None
    return None


def gpu_uuid(device: str) -> str:
    """The same in all processes and containers, whatever number they know the GPU by."""
    import torch

    return str(torch.cuda.get_device_properties(device).uuid)


@contextlib.contextmanager
def loading_turn(
    devices: Sequence[str],
    *,
    while_waiting: Callable[[], object],
    folder: Path | None = None,
    seconds: float = TURN_SECONDS,
) -> Iterator[None]:
    """Holds the locks of these GPUs while this process loads a model, tries its steps and allocates its KV cache.

    So nobody's peak meets another's. Locks are files in the cache directory, which containers of one machine may share;
    all are taken in one order, and the system releases those of a process that dies. Nothing is locked for a CPU, nor
    where no file can be written; after `seconds` in vain, both told on standard error.

    `while_waiting`: called every second.
    """
    with contextlib.ExitStack() as stack:
        for uuid in sorted({gpu_uuid(device) for device in devices if device_type(device) == "cuda"}):
            path = (folder or user_cache_directory()) / "locks" / f"gpu-{uuid}"
            try:
                stack.enter_context(locked(path, while_waiting=while_waiting, seconds=seconds))
            except OSError as error:  # TimeoutError is one
                sys.stderr.write(f"nodes on GPU {uuid} may load at the same time: {error}\n")
        yield
