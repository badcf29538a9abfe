"""Device names in torch's notation ("cpu", "cuda", "cuda:1"), and the error for a missing torch. Torch-free."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from outrider.errors import ConfigError
from outrider.extras import install_command

DRIVER_LIBRARY = "libcuda.so.1"
AMD_DRIVER = Path("/dev/kfd")


def device_type(device: str) -> str:
    """Returns the device's name without its index: "cpu" or "cuda"."""
    return device.partition(":")[0]


def has_gpu_driver() -> bool:
    """Returns whether torch may find a GPU; torch's CPU build never does. Does not import torch, to save a second."""
    with suppress(PackageNotFoundError):
        if version("torch").endswith("+cpu"):
            return False
    try:
        ctypes.CDLL(DRIVER_LIBRARY)
    except OSError:
        return AMD_DRIVER.exists()
    return True


@contextmanager
def needs_torch(what: str) -> Iterator[None]:
    """Wraps imports of torch and transformers. Raises: ConfigError, naming what needs them, if one is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(f"{what} needs {error.name}, which is not installed: {install_command('torch')}") from error
