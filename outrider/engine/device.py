"""Names of devices, as torch writes them: "cpu", "cuda", "cuda:1"; the error for a missing torch. Torch-free."""

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
    """Without the number: "cpu" or "cuda"."""
    return device.partition(":")[0]


def has_gpu_driver() -> bool:
    """Whether torch, which takes a second to import, may find a GPU; not one that was built for CPUs."""
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
    """Wraps imports of torch and transformers. Raises: ConfigError where they are missing, with what needs them."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(f"{what} needs {error.name}, which is not installed: {install_command('torch')}") from error
