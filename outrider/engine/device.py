"""Names of devices, as torch writes them: "cpu", "cuda", "cuda:1". Torch-free."""

from __future__ import annotations

import ctypes
from pathlib import Path

DRIVER_LIBRARY = "libcuda.so.1"
AMD_DRIVER = Path("/dev/kfd")


def device_type(device: str) -> str:
    """Without the number: "cpu" or "cuda"."""
    return device.partition(":")[0]


def has_gpu_driver() -> bool:
    """Whether torch, which takes a second to import, may find a GPU."""
    try:
        ctypes.CDLL(DRIVER_LIBRARY)
    except OSError:
        return AMD_DRIVER.exists()
    return True
