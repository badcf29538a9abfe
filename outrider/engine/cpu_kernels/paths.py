"""Chooses the instruction path of a process: the best one that its processor supports. Torch-free.

The choice is made once, at start, and does not depend on the size of a product, because two paths give different bits,
and equal rows must give equal results. Only avx512 and avx512_bf16 give the same bits; measuring finds the faster one.
"""

from __future__ import annotations

import ctypes
import errno
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from outrider.engine.cpu_kernels.compiler import X86_64, CompileError, first_error, path_flags
from outrider.engine.cpu_kernels.dot_product_speed import are_multiply_adds_faster
from outrider.engine.cpu_kernels.library_cache import compile_library
from outrider.engine.processor import processor_fields
from outrider.errors import ConfigError
from outrider.progress import Progress, no_progress

AUTO = "auto"
TORCH = "torch"
FUSED = "fused"
"""The path of models on GPUs with fused layers; see outrider.engine.fused_decoder."""

_X86_64_V3 = ("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe")
_X86_64_V4 = (*_X86_64_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
_AVX512 = (*_X86_64_V4, "avx512_vnni")
_AVX512_BF16 = (*_AVX512, "avx512_bf16")
REQUIRED_FLAGS: Mapping[str, tuple[str, ...]] = {
    "portable": _X86_64_V3,
    "avx512": _AVX512,
    "avx512_bf16": _AVX512_BF16,
    "amx": (*_AVX512_BF16, "amx_tile", "amx_bf16", "amx_int8"),
}
"""The x86-64 CPU flags, spelled as in /proc/cpuinfo, that each path's compiler flags require."""

SAME_BITS = {"avx512": "avx512_bf16"}
"""Maps a path to another one that computes the same bits with other instructions."""

PREFERENCE = ("amx", "avx512_bf16", "avx512", "portable")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelChoice:
    """The kernels of this process."""

    path: str  # one of PREFERENCE, or FUSED or TORCH
    library: Path | None  # None for FUSED and TORCH
    reason: str = ""  # why a better path was not chosen; empty if there is nothing to explain

    @property
    def arithmetic(self) -> str:
        """A path that identifies the bits of these kernels' results. It is the same for paths with the same bits."""
        return SAME_BITS.get(self.path, self.path)

    def __str__(self) -> str:
        """Returns a text for users: "native kernels: amx"."""
        if self.path == FUSED:
            return "fused Triton kernels"
        reason = f" ({self.reason})" if self.reason else ""
        if self.library is None:
            return f"native kernels: none{reason}; torch kernels are used"
        return f"native kernels: {self.path}{reason}"


def choose_kernels(
    wanted: str = "auto", *, cpu_flags: frozenset[str] | None = None, progress: Progress = no_progress
) -> KernelChoice:
    """Returns the best path that this processor supports and whose library is available, or the `wanted` one.

    The first process that needs a library compiles it. Whatever the path needs from the system, such as AMX tiles, is
    enabled for this process.

    Args:
        wanted: "auto", "torch", or one of PREFERENCE.
        cpu_flags: the processor's flags; by default those of this machine's processor.
        progress: receives the progress of compiling.

    Raises:
        ConfigError: if the wanted path is not available.
    """
    if wanted == TORCH:
        return KernelChoice(path=TORCH, library=None, reason="model.kernels is torch")
    cpu_flags = processor_flags() if cpu_flags is None else cpu_flags
    reasons: list[str] = []
    for path in PREFERENCE if wanted == AUTO else (wanted,):
        lacks = _what_processor_lacks(path, cpu_flags)
        if lacks and wanted == AUTO and path != PREFERENCE[-1]:
            continue  # no reason is given, because most processors have no AMX
        library, reason = (None, lacks) if lacks else _find_library(path, progress)
        if library is not None and not (reason := _why_not_ready(library)):
            choice = KernelChoice(path=path, library=library, reason="; ".join(reasons))
            return _faster_of_same_bits(choice, progress) if wanted == AUTO else choice
        reasons.append(f"{path}: {reason}")
    if wanted != AUTO:
        raise ConfigError(f"model.kernels {wanted} is not available: {reason}; use auto or torch")
    return KernelChoice(path=TORCH, library=None, reason=reason)


def _faster_of_same_bits(choice: KernelChoice, progress: Progress) -> KernelChoice:
    """Replaces avx512_bf16 by avx512 if that is faster on this processor and its library is available."""
    assert choice.library is not None
    if choice.path != "avx512_bf16" or not are_multiply_adds_faster(choice.library, processor_name()):
        return choice
    library, _ = _find_library("avx512", progress)
    if library is None or _why_not_ready(library):
        return choice
    reasons = filter(None, (choice.reason, "avx512_bf16: its instruction is slower here"))
    return KernelChoice(path="avx512", library=library, reason="; ".join(reasons))


def processor_flags() -> frozenset[str]:
    """Returns this processor's flags according to Linux; empty on other systems."""
    return frozenset(processor_fields().get("flags", "").split())


def processor_name() -> str:
    """Returns a name of this type of processor for file names, such as "AuthenticAMD-25-17-1"."""
    about = processor_fields()
    return "-".join(about.get(key, "") for key in ("vendor_id", "cpu family", "model", "stepping"))


def _what_processor_lacks(path: str, cpu_flags: frozenset[str]) -> str:
    """Returns why a path cannot run here, or an empty string."""
    if platform.machine() not in X86_64:
        return "" if path in path_flags() else f"not for {platform.machine()}"
    missing = [flag for flag in REQUIRED_FLAGS[path] if flag not in cpu_flags]
    if not missing:
        return ""
    return f"the processor has no {', '.join(missing)}" if cpu_flags else "the system does not report processor flags"


def _find_library(path: str, progress: Progress) -> tuple[Path | None, str]:
    """Returns the file of a path's library, or None and the reason."""
    try:
        return compile_library(path, progress), ""
    except CompileError as error:
        return None, first_error(str(error))
    except OSError as error:
        return None, f"cannot store compiled kernels: {error}"


def _why_not_ready(library: Path) -> str:
    """Loads the library and lets it request what it needs from the system. Returns why that failed, or ""."""
    try:
        functions = ctypes.CDLL(str(library))
    except OSError as error:
        return f"it cannot be loaded: {error}"
    code = functions.outrider_prepare_process()
    return f"the system does not allow it ({errno.errorcode.get(code, code)})" if code else ""
