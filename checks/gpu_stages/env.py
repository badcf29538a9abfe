"""The machine's hardware and software, and its two ceilings: memory bandwidth and speed of matrix products."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path
from statistics import median

from checks.gpu_stages.day import Day

PACKAGES = ("torch", "triton", "transformers", "tokenizers", "numpy", "grpcio", "protobuf", "accelerate", "safetensors")
CARRIED = Path(__file__).resolve().parent.parent / "gpu_wheels.txt"
"""File that lists packages that the machine lacks, so that they are carried to it."""
PRODUCT_SIZE = 8192
COPY_BYTES = 1 << 30


def run(day: Day) -> None:
    lines = CARRIED.read_text(encoding="utf-8").splitlines()
    missing = [name for name in lines if not name.startswith("#") and not _version(name)]
    day.tell(
        "machine",
        python=platform.python_version(),
        libc=" ".join(platform.libc_ver()),
        cpus=os.cpu_count(),
        versions={name: _version(name) for name in PACKAGES},
        missing=missing,
        compilers=[name for name in ("gcc", "g++", "nvcc") if shutil.which(name)],
        free_gib={str(path): _free_gib(path) for path in (Path("/dev/shm"), Path("/tmp"), Path.home(), day.scratch)},  # noqa: S108 only looked at
        nvidiactl=Path("/dev/nvidiactl").exists(),
        cuda_library=_has_library("libcuda.so.1"),
    )
    day.expect(f"packages are missing: {', '.join(missing)}", not missing)
    day.tell("native_kernels", paths=adopt_kernels())
    if not day.is_gpu:
        day.tell("ceilings", copy_gb_s=round(bytes_per_second("cpu") / 1e9, 1))
        return
    import torch

    properties = torch.cuda.get_device_properties(0)
    day.tell(
        "ceilings",
        gpu=properties.name,
        capability=torch.cuda.get_device_capability(),
        multiprocessors=properties.multi_processor_count,
        memory_gib=round(properties.total_memory / (1 << 30), 1),
        free_gib=round(torch.cuda.mem_get_info()[0] / (1 << 30), 1),
        copy_gb_s=round(bytes_per_second("cuda") / 1e9),
        tflops=round(_product_flops() / 1e12),
        smi=_nvidia_smi(),
    )


def bytes_per_second(device: str) -> float:
    """Returns the bandwidth of a large copy, in bytes read and written per second: the best of ten."""
    import time

    import torch

    def wait() -> None:
        if device != "cpu":
            torch.cuda.synchronize(device)

    source = torch.ones(COPY_BYTES if device != "cpu" else COPY_BYTES >> 4, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(10):
        wait()
        started = time.perf_counter()
        target.copy_(source)
        wait()
        best = min(best, time.perf_counter() - started)
    return 2 * source.numel() / best


def _product_flops() -> float:
    """Returns the floating-point operations per second of a large bfloat16 product: the median of six."""
    import torch

    left = torch.randn((PRODUCT_SIZE, PRODUCT_SIZE), device="cuda", dtype=torch.bfloat16)
    times = []
    for _ in range(8):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        left @ left
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3)
    return 2 * PRODUCT_SIZE**3 / median(times[2:])


def adopt_kernels() -> dict[str, str]:
    """Returns the state of native CPU kernels by instruction path: "here", "carried" or "absent".

    The names of kernel libraries depend on the C library's version. Libraries built elsewhere against an older version
    work here, too, so they are renamed for this machine.
    """
    from outrider.engine.cpu_kernels.compiler import path_flags
    from outrider.engine.cpu_kernels.library_cache import CACHED_LIBRARY, libraries_directory, library_folder

    folder, found = libraries_directory(), {}
    for path, flags in path_flags().items():
        wanted = library_folder(path, flags)
        carried = [each for each in folder.glob(f"{path}-*") if each.name.removeprefix(f"{path}-").isalnum()]
        found[path] = "here" if wanted.exists() else "absent"
        if not wanted.exists() and carried and _has_library(str(carried[0] / CACHED_LIBRARY)):
            carried[0].rename(wanted)
            found[path] = "carried"
    return found


def _version(package: str) -> str:
    """Returns a package's version, or "" if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _free_gib(folder: Path) -> int | None:
    """Returns the free space in GiB, or None if there is no such folder."""
    try:
        return shutil.disk_usage(folder).free >> 30
    except OSError:
        return None


def _has_library(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def _nvidia_smi() -> str:
    query = "name,driver_version,memory.total,clocks.sm,clocks.mem,temperature.gpu,power.draw,mig.mode.current"
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (done.stdout or done.stderr).strip()
