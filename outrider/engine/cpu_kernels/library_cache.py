"""Compiled libraries in the user's cache, keyed by a hash of all their inputs. Standard library only.

Each library has a folder, which is complete or absent: the library itself, its SHA-256 and the compiler's warnings.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from outrider.cache_directory import locked, remove_unused, user_cache_directory
from outrider.engine.cpu_kernels.compiler import (
    COMPILE_FLAGS,
    LINK_FLAGS,
    LINUX_LINK_FLAGS,
    CompileError,
    Compiler,
    find_compiler,
    no_compiler,
    path_flags,
    source_hash,
    source_units,
)
from outrider.progress import Progress, no_progress

LIBRARIES_VARIABLE = "OUTRIDER_KERNEL_LIBRARIES"
"""Environment variable that names the folder of compiled libraries; by default `kernels` in the user's cache."""

CACHED_LIBRARY, CACHED_ENTRY = "library.so", "entry.json"
LOCK_SECONDS = 3600.0


def libraries_directory() -> Path:
    """Returns the folder of compiled libraries."""
    chosen = os.environ.get(LIBRARIES_VARIABLE)
    return (Path(chosen).expanduser() if chosen else user_cache_directory() / "kernels").resolve()


def compile_library(path: str, progress: Progress = no_progress) -> Path:
    """Returns the library of one instruction path.

    Raises: the errors of `compile_libraries`, and CompileError if the path's library cannot be compiled.
    """
    libraries, left_out = compile_libraries({path: path_flags()[path]}, progress=progress)
    if path in left_out:
        raise CompileError(left_out[path])
    return libraries[path]


def compile_libraries(
    paths: Mapping[str, tuple[str, ...]], *, progress: Progress = no_progress
) -> tuple[dict[str, Path], dict[str, str]]:
    """Returns libraries by path, and the reason for each path without a library. Compiles libraries not in the cache.

    The first process that needs a library compiles it; the others wait. A cached library needs neither a compiler nor
    write permission.

    Args:
        paths: each path's additional flags, by name.
        progress: receives the stage "kernels" with numbers of compiled units, or zeros while another process compiles.

    Raises:
        CompileError: if there is no compiler, or it rejects a source.
        OSError: if the cache cannot be written.
    """
    folder = libraries_directory()
    entries = {path: library_folder(path, flags) for path, flags in paths.items()}
    left_out: dict[str, str] = {}
    if missing := [path for path in paths if not _is_intact(entries[path])]:
        compiler = find_compiler()
        if compiler is None:
            raise CompileError(no_compiler())
        with locked(folder / "lock", while_waiting=lambda: progress("kernels", 0, 0), seconds=LOCK_SECONDS):
            missing = [path for path in missing if not _is_intact(entries[path])]
            left_out = {path: reason for path in missing if (reason := compiler.knows(paths[path]))}
            for leftover in folder.glob("objects-*"):  # left by killed processes
                shutil.rmtree(leftover, ignore_errors=True)
            remove_unused(path for path in folder.iterdir() if path.is_dir())
            _compile(compiler, {path: paths[path] for path in missing if path not in left_out}, entries, progress)
    return {path: entry / CACHED_LIBRARY for path, entry in entries.items() if path not in left_out}, left_out


def library_folder(path: str, flags: Sequence[str]) -> Path:
    """Returns the folder of an instruction path's library, which may not exist yet.

    Its name has a hash of sources, flags and machine type, but not of the compiler, since results do not depend on it.
    """
    parts = (source_hash(), flags, platform.machine(), platform.libc_ver())
    return libraries_directory() / f"{path}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}"


def _compile(
    compiler: Compiler,
    wanted: Mapping[str, tuple[str, ...]],
    entries: Mapping[str, Path],
    progress: Progress,
) -> None:
    """Compiles a library for each path in `wanted`, with the path's flags, into the path's folder in `entries`.

    A folder appears only when it is complete.
    """
    if not wanted:
        return
    units = source_units()
    link_flags = (*LINK_FLAGS, *(LINUX_LINK_FLAGS if sys.platform == "linux" else ()))
    with (
        tempfile.TemporaryDirectory(dir=entries[next(iter(wanted))].parent, prefix="objects-") as name,
        ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        objects = {path: [f"{name}/{path}-{index}.o" for index in range(len(units))] for path in wanted}
        jobs = {
            path: [
                pool.submit(compiler.compile, unit, [*COMPILE_FLAGS, *flags, *compiler.warning_flags, "-o", file])
                for unit, file in zip(units, objects[path], strict=True)
            ]
            for path, flags in wanted.items()
        }
        all_jobs = [job for path in wanted for job in jobs[path]]
        try:
            for num_done, job in enumerate(as_completed(all_jobs), 1):
                job.result()
                progress("kernels", num_done, len(all_jobs))
        except CompileError:
            pool.shutdown(wait=False, cancel_futures=True)  # cancels jobs that have not begun
            raise
        for path in wanted:
            unfinished = Path(name, path)
            unfinished.mkdir()
            library = unfinished / CACHED_LIBRARY
            linking = compiler.run([*objects[path], *link_flags, "-o", str(library)])
            entry = {
                "sha256": hashlib.sha256(library.read_bytes()).hexdigest(),
                "warnings": "".join([*(job.result() for job in jobs[path]), linking]),
            }
            (unfinished / CACHED_ENTRY).write_text(json.dumps(entry, indent=2) + "\n", encoding="utf-8")
            shutil.rmtree(entries[path], ignore_errors=True)  # a damaged entry
            unfinished.rename(entries[path])


def _is_intact(folder: Path) -> bool:
    """Returns whether the folder has an undamaged library, and marks it as used."""
    try:
        sha256 = json.loads((folder / CACHED_ENTRY).read_text(encoding="utf-8"))["sha256"]
        if hashlib.sha256((folder / CACHED_LIBRARY).read_bytes()).hexdigest() != sha256:
            return False
    except (OSError, ValueError, KeyError, TypeError):
        return False
    with contextlib.suppress(OSError):
        folder.touch()
    return True
