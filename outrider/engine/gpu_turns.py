"""Serialises model loading by several processes on one GPU."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence

from outrider.cache_directory import locked, user_cache_directory
from outrider.engine.device import device_type
from outrider.progress import Progress

TURN_SECONDS = 600.0
"""Maximum number of seconds that a process waits for others to load their models. After that it loads at the same time
as they do, which is safe because memory is measured per process."""


@contextlib.contextmanager
def loading_turn(devices: Sequence[str], progress: Progress) -> Iterator[None]:
    """Holds the locks of these GPUs while this process loads a model, tries its steps and allocates its KV cache.

    So the memory peaks of several processes do not coincide. Locks are files in the cache directory, which containers
    may share, and are named by the GPU's UUID, the same in all containers. All processes take locks in the same
    order, and the system releases those of a process that dies. Nothing is locked for a CPU. If no file can be written,
    or after TURN_SECONDS, the process continues without the lock and says so on standard error. While it waits, it
    reports stage "gpu" to `progress` every second.
    """
    with contextlib.ExitStack() as stack:
        for uuid in sorted({_uuid(device) for device in devices if device_type(device) == "cuda"}):
            path = user_cache_directory() / "locks" / f"gpu-{uuid}"
            try:
                stack.enter_context(locked(path, while_waiting=lambda: progress("gpu", 0, 0), seconds=TURN_SECONDS))
            except OSError as error:  # TimeoutError is an OSError
                sys.stderr.write(f"nodes on GPU {uuid} may load at the same time: {error}\n")
        yield


def _uuid(device: str) -> str:
    import torch

    return str(torch.cuda.get_device_properties(device).uuid)
