"""Compiled libraries in the user's cache, by a hash of everything that they are made of. Standard library only.

Each is a folder, complete or absent: the library, its SHA-256 and what the compiler warned of.
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
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from outrider.cache_directory import user_cache_directory
from outrider.engine.cpu_kernels.compiler import (
    COMPILE_FLAGS,
    LINK_FLAGS,
    LINUX_LINK_FLAGS,
    CompileError,
    Compiler,
    add_files,
    find_compiler,
    no_compiler,
    path_flags,
    source_hash,
    source_units,
)

CACHED_LIBRARY, CACHED_ENTRY = "library.so", "entry.json"
KEPT_SECONDS = 30 * 24 * 3600
"""How long a library that nobody asks for stays in the cache."""
LOCK_SECONDS, LOCK_POLL_SECONDS = 3600.0, 0.1

Progress = Callable[[int, int], None]
"""progress(compiled units, all units); all is 0 while another process compiles."""


def no_progress(_num_done: int, _num_units: int) -> None:
    """Tells nobody."""


@dataclass(frozen=True, slots=True)
class CachedLibrary:
    file: Path
    warnings: str


def cached_library(path: str, progress: Progress = no_progress) -> Path:
    """The library of a path in the user's cache, compiled by the first process that wants it; the others wait.

    Raises CompileError without a compiler, and when it does not know the path or refuses a
    source; OSError when the cache cannot be written.
    """
    compiler = find_compiler()
    if compiler is None:
        raise CompileError(no_compiler())
    with locked_cache(progress) as cache:
        libraries, left_out = obtain(cache, compiler, {path: path_flags()[path]}, (), (), progress)
    if path in left_out:
        raise CompileError(left_out[path])
    return libraries[path].file


@contextlib.contextmanager
def locked_cache(progress: Progress = no_progress) -> Iterator[Path]:
    """The cache's folder, for this process alone. The system releases the lock of a process that dies.

    Raises OSError when it cannot be written, CompileError when another process holds it for an hour.
    """
    folder = (user_cache_directory() / "kernels").resolve()
    deadline = time.monotonic() + LOCK_SECONDS
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("ab") as lock:
        while not _try_lock(lock):
            if time.monotonic() > deadline:
                raise CompileError(f"another process has been compiling kernels into {folder} for an hour")
            progress(0, 0)
            time.sleep(LOCK_POLL_SECONDS)
        yield folder


def _try_lock(file: BinaryIO) -> bool:
    import fcntl  # not on Windows, where clients are installed and nothing is compiled

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def obtain(
    cache: Path,
    compiler: Compiler,
    paths: Mapping[str, tuple[str, ...]],
    extra_flags: Sequence[str],
    inputs: Sequence[Path],
    progress: Progress,
) -> tuple[dict[str, CachedLibrary], dict[str, str]]:
    """The libraries of `paths` in a locked cache, compiled where it lacks them; and why others are left out."""
    all_flags = {path: [*COMPILE_FLAGS, *flags, *extra_flags] for path, flags in paths.items()}
    entries = {path: cache / library_key(compiler, flags, inputs) for path, flags in all_flags.items()}
    found = {path: library for path, entry in entries.items() if (library := _read_entry(entry)) is not None}
    left_out = {path: compiler.knows(paths[path]) for path in paths if path not in found}
    missing = {path: all_flags[path] for path, reason in left_out.items() if not reason}
    if missing:
        _remove_unused(cache)
        _compile(compiler, missing, extra_flags, entries, progress)
    for path in missing:
        if (library := _read_entry(entries[path])) is None:
            raise CompileError(f"{entries[path]} was compiled and cannot be read")
        found[path] = library
    return (
        {path: found[path] for path in paths if path in found},
        {path: reason for path, reason in left_out.items() if reason},
    )


def library_key(compiler: Compiler, flags: Sequence[str], inputs: Sequence[Path] = ()) -> str:
    """What a library is known by in the cache: a hash of sources, flags, compiler and kind of machine."""
    parts = (source_hash(), compiler.command, compiler.version, list(flags), platform.machine(), platform.libc_ver())
    digest = hashlib.sha256(repr(parts).encode())
    add_files(digest, inputs)
    return digest.hexdigest()[:32]


def _compile(
    compiler: Compiler,
    wanted: Mapping[str, list[str]],
    link_flags: Sequence[str],
    entries: Mapping[str, Path],
    progress: Progress,
) -> None:
    """Compiles `wanted`, by path its flags, into its folders of `entries`, each complete or absent."""
    units = source_units()
    link_flags = (*LINK_FLAGS, *(LINUX_LINK_FLAGS if sys.platform == "linux" else ()), *link_flags)
    with (
        tempfile.TemporaryDirectory(dir=entries[next(iter(wanted))].parent, prefix="objects-") as name,
        ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        objects = {path: [f"{name}/{path}-{index}.o" for index in range(len(units))] for path in wanted}
        jobs = {
            path: [
                pool.submit(compiler.compile, unit, [*flags, *compiler.warning_flags, "-o", file])
                for unit, file in zip(units, objects[path], strict=True)
            ]
            for path, flags in wanted.items()
        }
        all_jobs = [job for path in wanted for job in jobs[path]]
        try:
            for num_done, job in enumerate(as_completed(all_jobs), 1):
                job.result()
                progress(num_done, len(all_jobs))
        except CompileError:
            pool.shutdown(wait=False, cancel_futures=True)  # what has not begun would be for nothing
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
            shutil.rmtree(entries[path], ignore_errors=True)  # a damaged one
            unfinished.rename(entries[path])


def _read_entry(folder: Path) -> CachedLibrary | None:
    """None where there is no library, or one that is damaged."""
    try:
        entry: dict[str, str] = json.loads((folder / CACHED_ENTRY).read_text(encoding="utf-8"))
        if hashlib.sha256((folder / CACHED_LIBRARY).read_bytes()).hexdigest() != entry["sha256"]:
            return None
        library = CachedLibrary(folder / CACHED_LIBRARY, entry["warnings"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    folder.touch()  # somebody wants it
    return library


def _remove_unused(cache: Path) -> None:
    """Old libraries, and what processes that were killed left behind. Call it with the lock held."""
    oldest = time.time() - KEPT_SECONDS
    for folder in cache.iterdir():
        if folder.is_dir() and (folder.name.startswith("objects-") or folder.stat().st_mtime < oldest):
            shutil.rmtree(folder, ignore_errors=True)
