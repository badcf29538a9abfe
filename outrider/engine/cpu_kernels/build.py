"""Builds the kernels ahead of time: a library for each instruction path beside this file, and a manifest that says how.

    python -m outrider.engine.cpu_kernels.build

A checkout does this when it is set up, and whoever makes a wheel that shall carry them. Where it was not
done, a node compiles the one library that it needs when it first starts (paths.py). setup.py
reads the manifest while the package is being built: the standard library is all that this
file and those that it imports need.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from outrider.engine.cpu_kernels.compiler import (
    COMPILE_FLAGS,
    SANITIZER_FLAGS,
    CompileError,
    Compiler,
    find_compiler,
    no_compiler,
    path_flags,
    source_hash,
)
from outrider.engine.cpu_kernels.library_cache import Progress, locked_cache, no_progress, obtain

LIBRARIES = Path(__file__).resolve().parent / "libraries"
MANIFEST_NAME = "manifest.json"


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
    progress: Progress = no_progress,
) -> Manifest:
    """Puts every path that the compiler knows into `folder`; the others are named in the manifest, with the reason.

    Compiles what the user's cache does not hold; without a cache that can be written, it
    compiles all, and says so. `paths` are those of this kind of machine; tests bring others,
    by name the flags that each adds, and as `inputs` the files that those flags name.

    What lies there from earlier is replaced file by file, so that a process that has it
    loaded is not disturbed. Raises CompileError when a source is refused.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = path_flags() if paths is None else paths
    with contextlib.ExitStack() as stack:
        try:
            cache = stack.enter_context(locked_cache(progress))
        except OSError as error:
            print(f"compiled kernels are not kept: {error}", file=sys.stderr)
            cache = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="outrider-kernels-")))
        libraries, left_out = obtain(cache, compiler, paths, extra_flags, inputs, progress)
        for path, library in libraries.items():
            unfinished = folder / f"{path}.so.{os.getpid()}"
            shutil.copyfile(library.file, unfinished)
            unfinished.replace(library_path(folder, path))
    for path in left_out:
        library_path(folder, path).unlink(missing_ok=True)
    manifest = Manifest(
        source_hash=source_hash(),
        compiler=compiler.version,
        extra_flags=list(extra_flags),
        built={path: [*COMPILE_FLAGS, *paths[path]] for path in libraries},
        left_out=left_out,
        warnings="".join(dict.fromkeys(library.warnings for library in libraries.values())),
    )
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


def ensure_built(folder: Path, *, sanitize: bool = False, progress: Progress = no_progress) -> Manifest | None:
    """Builds what is not current; without a compiler keeps what is, and removes what is not. None where nothing is.

    Raises CompileError when a source is refused.
    """
    manifest = read_manifest(folder)
    compiler = find_compiler()
    if compiler is None:
        if manifest is not None and manifest.source_hash == source_hash():
            return manifest
        for file in (folder / MANIFEST_NAME, *(library_path(folder, path) for path in path_flags())):
            file.unlink(missing_ok=True)
        return None
    extra_flags = SANITIZER_FLAGS if sanitize else ()
    if manifest is not None and is_current(manifest, folder, compiler, extra_flags):
        (folder / MANIFEST_NAME).touch()  # make compares times
        return manifest
    return build(folder, compiler, extra_flags=extra_flags, progress=progress)


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
        manifest = ensure_built(arguments.into, sanitize=arguments.sanitize, progress=_print_progress)
        if arguments.warnings and manifest is not None and manifest.warnings:
            raise CompileError(manifest.warnings)
    except CompileError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"native kernels: none; {no_compiler()}" if manifest is None else describe(manifest))
    return 0


def _print_progress(num_done: int, num_units: int) -> None:
    if num_done in (1, num_units) and num_units:
        print(f"native kernels: {num_done} of {num_units} parts compiled", flush=True)


def _of(manifest: Manifest, reason: str) -> str:
    return ", ".join(path for path, other in manifest.left_out.items() if other == reason)


if __name__ == "__main__":
    sys.exit(main())
