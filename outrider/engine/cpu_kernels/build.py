"""Compiles the kernels: one shared library for each instruction path, and a manifest that says how.

A library is compiled once on a machine: it is kept in the user's cache by the hash of
everything it is made of, and every folder that wants it (a checkout's, a wheel's, that of a
check or a test) gets a copy.

setup.py runs this while the package is being built, where neither the package nor torch
can be imported: the standard library is all it needs. By hand, after a change or once
there is a compiler:

    python outrider/engine/cpu_kernels/build.py
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

SOURCE = Path(__file__).resolve().parent / "source"
LIBRARIES = Path(__file__).resolve().parent / "libraries"
SOURCE_SUFFIXES = (".cpp", ".h", ".map")
MANIFEST_NAME = "manifest.json"

X86_64 = ("x86_64", "AMD64")
X86_PATHS: Mapping[str, tuple[str, ...]] = {
    "portable": ("-march=x86-64-v3",),
    "avx512_bf16": ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni"),
    "amx": ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni", "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
}
OTHER_PATHS: Mapping[str, tuple[str, ...]] = {"portable": ()}

# No -ffast-math and no contraction: the same expression must round alike wherever it stands.
COMPILE_FLAGS = (
    "-std=c++20",
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fvisibility=hidden",
    "-fPIC",
    "-pthread",
)
LINK_FLAGS = ("-shared", "-pthread")
# A library that brings its own C++ runtime and shows nothing of it cannot meet another one in torch's process.
EXPORTS = "exports.map"
LINUX_LINK_FLAGS = ("-static-libstdc++", "-static-libgcc", f"-Wl,--version-script={EXPORTS}", "-Wl,-z,defs")
WARNING_FLAGS = (
    "-Wall",
    "-Wextra",
)  # what they find is kept with the library: errors for developers, nothing for users
# GCC 12 takes its own _mm512_undefined for a mistake wherever an intrinsic is inlined (GCC bug 105593), and tells
# of an ABI that no caller sees.
GCC_WARNING_FLAGS = ("-Wno-maybe-uninitialized", "-Wno-psabi")
SANITIZER_FLAGS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer", "-g")

CACHE_VARIABLE = "OUTRIDER_CACHE_DIR"
"""The directory in place of the user's cache."""

CACHED_LIBRARY, CACHED_ENTRY = "library.so", "entry.json"
KEPT_SECONDS = 30 * 24 * 3600
"""How long a library that nobody asks for stays in the cache."""
LOCK_SECONDS, LOCK_POLL_SECONDS = 3600.0, 0.1

NO_COMPILER = "no C++ compiler was found at install time"
PROBE = "#include <atomic>\nvoid wait(std::atomic<int>& value) { value.wait(0); }\n"  # what needs C++20 of the library


class CompileError(Exception):
    """The compiler knows the flags but refuses a source; its output is the message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What lies in a folder of libraries, and why the rest does not."""

    source_hash: str
    compiler: str = ""  # the first line of its --version
    machine: str = field(default_factory=platform.machine)
    extra_flags: list[str] = field(default_factory=list)
    built: dict[str, list[str]] = field(default_factory=dict)  # by path: its flags
    left_out: dict[str, str] = field(default_factory=dict)  # by path: the reason
    warnings: str = ""  # what the compiler said besides

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = folder / f"{MANIFEST_NAME}.{os.getpid()}"
        unfinished.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        unfinished.replace(folder / MANIFEST_NAME)


@dataclass(frozen=True, slots=True)
class Compiler:
    command: tuple[str, ...]
    version: str  # the first line of its --version

    @property
    def warning_flags(self) -> tuple[str, ...]:
        return (*WARNING_FLAGS, *(() if "clang" in self.version else GCC_WARNING_FLAGS))

    def knows(self, flags: Sequence[str]) -> str:
        """Empty, or the reason why these flags do not work."""
        command = [*self.command, *COMPILE_FLAGS, *flags, "-fsyntax-only", "-x", "c++", "-"]
        result = subprocess.run(command, input=PROBE, capture_output=True, text=True, check=False)
        return "" if result.returncode == 0 else f"{self.version}: {first_error(result.stderr)}"

    def run(self, arguments: Sequence[str]) -> str:
        """Runs in the folder of the sources; returns the warnings. Raises CompileError."""
        command = [*self.command, *arguments]
        result = subprocess.run(command, cwd=SOURCE, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise CompileError(f"{shlex.join(command)}\n{result.stderr}")
        return result.stderr


def find_compiler() -> Compiler | None:
    """$CXX and nothing else where it is set, otherwise c++, g++ or clang++; None where none of them runs."""
    chosen = os.environ.get("CXX", "")
    for candidate in (chosen,) if chosen else ("c++", "g++", "clang++"):
        command = shlex.split(candidate)
        if not command or shutil.which(command[0]) is None:
            continue
        result = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
        if result.returncode == 0:
            return Compiler(tuple(command), (result.stdout.splitlines() or [command[0]])[0])
    return None


def path_flags() -> Mapping[str, tuple[str, ...]]:
    """The instruction paths of this kind of machine, with what each adds to the flags."""
    return X86_PATHS if platform.machine() in X86_64 else OTHER_PATHS


def source_hash() -> str:
    """SHA-256 in hexadecimal over everything that the libraries are made of: sources and flags."""
    flags = (
        COMPILE_FLAGS,
        LINK_FLAGS,
        LINUX_LINK_FLAGS,
        WARNING_FLAGS,
        GCC_WARNING_FLAGS,
        sorted(path_flags().items()),
    )
    digest = hashlib.sha256(repr(flags).encode())
    _add_files(digest, [path for path in SOURCE.iterdir() if path.suffix in SOURCE_SUFFIXES])
    return digest.hexdigest()


def user_cache_directory() -> Path:
    """What may be made again is kept here: $OUTRIDER_CACHE_DIR, else `outrider` in the user's own cache."""
    if chosen := os.environ.get(CACHE_VARIABLE, ""):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outrider"


def read_manifest(folder: Path) -> Manifest | None:
    """None where nothing was ever built, or by another version of this file."""
    try:
        return Manifest(**json.loads((folder / MANIFEST_NAME).read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def library_path(folder: Path, path: str) -> Path:
    return folder / f"{path}.so"


def build(
    folder: Path,
    compiler: Compiler,
    *,
    extra_flags: Sequence[str] = (),
    paths: Mapping[str, tuple[str, ...]] | None = None,
    inputs: Sequence[Path] = (),
) -> Manifest:
    """Puts every path that the compiler knows into `folder`; the others are named in the manifest, with the reason.

    Compiles what the user's cache does not hold. `paths` are those of this kind of machine;
    tests bring others, by name the flags that each adds, and as `inputs` the files that those
    flags name.

    What lies there from earlier is replaced file by file, so that a process that has it
    loaded is not disturbed. Raises CompileError when a source is refused.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = path_flags() if paths is None else paths
    built = {path: [*COMPILE_FLAGS, *flags] for path, flags in paths.items()}
    keys = {path: library_key(compiler, [*flags, *extra_flags], inputs) for path, flags in built.items()}
    left_out: dict[str, str] = {}
    with locked_cache() as cache:
        entries = {path: entry for path, key in keys.items() if (entry := _read_entry(cache / key)) is not None}
        for path in [path for path in built if path not in entries]:
            if reason := compiler.knows(paths[path]):
                left_out[path] = reason
                del built[path]
        if missing := {path: flags for path, flags in built.items() if path not in entries}:
            _remove_unused(cache)
            entries |= _compile(compiler, missing, extra_flags, {path: cache / keys[path] for path in missing})
        for path in built:
            unfinished = folder / f"{path}.so.{os.getpid()}"
            shutil.copyfile(cache / keys[path] / CACHED_LIBRARY, unfinished)
            unfinished.replace(library_path(folder, path))
    for path in left_out:
        library_path(folder, path).unlink(missing_ok=True)
    manifest = Manifest(
        source_hash=source_hash(),
        compiler=compiler.version,
        extra_flags=list(extra_flags),
        built=built,
        left_out=left_out,
        warnings="".join(dict.fromkeys(entries[path]["warnings"] for path in built)),
    )
    manifest.write(folder)
    return manifest


def library_key(compiler: Compiler, flags: Sequence[str], inputs: Sequence[Path] = ()) -> str:
    """What a library is known by in the cache: a hash of sources, flags, compiler and kind of machine."""
    parts = (source_hash(), compiler.command, compiler.version, list(flags), platform.machine(), platform.libc_ver())
    digest = hashlib.sha256(repr(parts).encode())
    _add_files(digest, inputs)
    return digest.hexdigest()[:32]


@contextlib.contextmanager
def locked_cache() -> Iterator[Path]:
    """The cache's folder, for this process alone; a temporary one, and a line that says so, where it cannot be used.

    The system releases the lock of a process that dies. Raises CompileError when another one holds it for an hour.
    """
    folder = (user_cache_directory() / "kernels").resolve()
    deadline = time.monotonic() + LOCK_SECONDS
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context((folder / "lock").open("ab"))
            while not _try_lock(lock):
                if time.monotonic() > deadline:
                    raise CompileError(f"another process has been compiling kernels into {folder} for an hour")
                time.sleep(LOCK_POLL_SECONDS)
        except OSError as error:
            print(f"compiled kernels are not kept, {folder} cannot be used: {error.strerror}", file=sys.stderr)
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="outrider-kernels-")))
        yield folder


def _try_lock(file: BinaryIO) -> bool:
    import fcntl  # not on Windows, where clients are installed and nothing is compiled

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _compile(
    compiler: Compiler, wanted: Mapping[str, list[str]], extra_flags: Sequence[str], entries: Mapping[str, Path]
) -> dict[str, dict[str, str]]:
    """Compiles `wanted`, by path its flags, into its folders `entries`; returns what _read_entry does for each."""
    sources = sorted(SOURCE.glob("*.cpp"))
    more = (*extra_flags, *compiler.warning_flags)
    done: dict[str, dict[str, str]] = {}
    with (
        tempfile.TemporaryDirectory(dir=next(iter(entries.values())).parent, prefix="objects-") as name,
        ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        jobs = {
            path: [
                pool.submit(compiler.run, [*flags, *more, "-c", source.name, "-o", f"{name}/{path}-{source.stem}.o"])
                for source in sources
            ]
            for path, flags in wanted.items()
        }
        try:
            for job in as_completed([job for path in jobs for job in jobs[path]]):
                job.result()
        except CompileError:
            pool.shutdown(wait=False, cancel_futures=True)  # what has not begun would be for nothing
            raise
        link_flags = (*LINK_FLAGS, *(LINUX_LINK_FLAGS if sys.platform == "linux" else ()), *extra_flags)
        for path, entry in entries.items():
            unfinished = Path(name, path)
            unfinished.mkdir()
            library = unfinished / CACHED_LIBRARY
            parts = [f"{name}/{path}-{source.stem}.o" for source in sources]
            linking = compiler.run([*parts, *link_flags, "-o", str(library)])
            warnings = "".join([*(job.result() for job in jobs[path]), linking])
            done[path] = {"sha256": hashlib.sha256(library.read_bytes()).hexdigest(), "warnings": warnings}
            (unfinished / CACHED_ENTRY).write_text(json.dumps(done[path], indent=2) + "\n", encoding="utf-8")
            shutil.rmtree(entry, ignore_errors=True)  # a damaged one
            unfinished.rename(entry)
    return done


def _read_entry(folder: Path) -> dict[str, str] | None:
    """SHA-256 and warnings of a cached library; None where there is none, or one that is damaged."""
    try:
        entry: dict[str, str] = json.loads((folder / CACHED_ENTRY).read_text(encoding="utf-8"))
        if hashlib.sha256((folder / CACHED_LIBRARY).read_bytes()).hexdigest() != entry["sha256"]:
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    folder.touch()  # somebody wants it
    return entry


def _remove_unused(cache: Path) -> None:
    """Old libraries, and what processes that were killed left behind. Call it with the lock held."""
    oldest = time.time() - KEPT_SECONDS
    for folder in cache.iterdir():
        if folder.is_dir() and (folder.name.startswith("objects-") or folder.stat().st_mtime < oldest):
            shutil.rmtree(folder, ignore_errors=True)


def _add_files(digest: Any, files: Sequence[Path]) -> None:
    for path in sorted(files):
        content = path.read_bytes()
        digest.update(f"{path.name}:{len(content)}:".encode() + content)


def record_absence(folder: Path, reason: str) -> Manifest:
    """Removes all libraries from `folder` and leaves the reason, for nodes to tell at start."""
    for path in path_flags():
        library_path(folder, path).unlink(missing_ok=True)
    manifest = Manifest(source_hash=source_hash(), left_out=dict.fromkeys(path_flags(), reason))
    manifest.write(folder)
    return manifest


def is_current(manifest: Manifest, folder: Path, compiler: Compiler, extra_flags: Sequence[str] = ()) -> bool:
    """Whether building again would give the same."""
    return (
        manifest.source_hash == source_hash()
        and manifest.compiler == compiler.version
        and manifest.machine == platform.machine()
        and manifest.extra_flags == list(extra_flags)
        and all(library_path(folder, path).is_file() for path in manifest.built)
    )


def ensure_built(folder: Path, *, sanitize: bool = False) -> Manifest:
    """Builds what is not current; without a compiler keeps what is, or records why there is nothing.

    Raises CompileError when a source is refused.
    """
    manifest = read_manifest(folder)
    compiler = find_compiler()
    if compiler is None:
        if manifest is not None and manifest.built and manifest.source_hash == source_hash():
            return manifest
        chosen = os.environ.get("CXX", "")
        return record_absence(folder, f"{NO_COMPILER} (CXX={chosen})" if chosen else NO_COMPILER)
    extra_flags = SANITIZER_FLAGS if sanitize else ()
    if manifest is not None and is_current(manifest, folder, compiler, extra_flags):
        (folder / MANIFEST_NAME).touch()  # make compares times
        return manifest
    return build(folder, compiler, extra_flags=extra_flags)


def describe(manifest: Manifest) -> str:
    """One line for people."""
    built = ", ".join(manifest.built) or "none"
    reasons = sorted(set(manifest.left_out.values()))
    return f"native kernels: {built}" + "".join(f"; without {_of(manifest, reason)}: {reason}" for reason in reasons)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 also without a compiler, 1 when a source does not compile or, if asked, warns."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--into", type=Path, default=LIBRARIES, help="the folder (default: beside this file)")
    parser.add_argument("--warnings", action="store_true", help="warnings are errors; for developers")
    parser.add_argument("--sanitize", action="store_true", help="with address and undefined-behaviour sanitizers")
    arguments: Any = parser.parse_args(argv)
    try:
        manifest = ensure_built(arguments.into, sanitize=arguments.sanitize)
        if arguments.warnings and manifest.warnings:
            raise CompileError(manifest.warnings)
    except CompileError as error:
        print(error, file=sys.stderr)
        return 1
    print(describe(manifest))
    return 0


def _of(manifest: Manifest, reason: str) -> str:
    return ", ".join(path for path, other in manifest.left_out.items() if other == reason)


def first_error(output: str) -> str:
    lines = [line for line in output.splitlines() if "error:" in line] or output.splitlines() or ["no reason given"]
    return lines[0].strip()


if __name__ == "__main__":
    sys.exit(main())
