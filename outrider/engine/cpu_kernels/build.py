"""Compiles the kernels: one shared library for each instruction path, and a manifest that says how.

setup.py runs this while the package is being built, where neither the package nor torch
can be imported: the standard library is all it needs. By hand, after a change or once
there is a compiler:

    python outrider/engine/cpu_kernels/build.py
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

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
WARNING_FLAGS = ("-Wall", "-Wextra", "-Werror")
# GCC 12 takes its own _mm512_undefined for a mistake wherever an intrinsic is inlined (GCC bug 105593), and tells
# of an ABI that no caller sees.
GCC_WARNING_FLAGS = ("-Wno-maybe-uninitialized", "-Wno-psabi")
SANITIZER_FLAGS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer", "-g")

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
        """For developers: warnings are errors."""
        return (*WARNING_FLAGS, *(() if "clang" in self.version else GCC_WARNING_FLAGS))

    def knows(self, flags: Sequence[str]) -> str:
        """Empty, or the reason why these flags do not work."""
        command = [*self.command, *COMPILE_FLAGS, *flags, "-fsyntax-only", "-x", "c++", "-"]
        result = subprocess.run(command, input=PROBE, capture_output=True, text=True, check=False)
        return "" if result.returncode == 0 else f"{self.version}: {first_error(result.stderr)}"

    def run(self, arguments: Sequence[str]) -> None:
        """In the folder of the sources. Raises CompileError."""
        command = [*self.command, *arguments]
        result = subprocess.run(command, cwd=SOURCE, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise CompileError(f"{shlex.join(command)}\n{result.stderr}")


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
    digest = hashlib.sha256(repr((COMPILE_FLAGS, LINK_FLAGS, LINUX_LINK_FLAGS, sorted(path_flags().items()))).encode())
    for path in sorted(path for path in SOURCE.iterdir() if path.suffix in SOURCE_SUFFIXES):
        content = path.read_bytes()
        digest.update(f"{path.name}:{len(content)}:".encode() + content)
    return digest.hexdigest()


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
) -> Manifest:
    """Compiles every path that the compiler knows into `folder`; the others are named in the manifest, with the reason.

    `paths` are those of this kind of machine; tests bring others, by name the flags that each adds.

    What lies there from earlier is replaced file by file, so that a process that has it
    loaded is not disturbed. Raises CompileError when a source is refused.
    """
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    built: dict[str, list[str]] = {}
    left_out: dict[str, str] = {}
    for path, flags in (path_flags() if paths is None else paths).items():
        reason = compiler.knows(flags)
        if reason:
            left_out[path] = reason
        else:
            built[path] = [*COMPILE_FLAGS, *flags]
    sources = sorted(SOURCE.glob("*.cpp"))
    with (
        tempfile.TemporaryDirectory(dir=folder, prefix="objects-") as objects,
        ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        jobs = [
            pool.submit(
                compiler.run,
                [*flags, *extra_flags, "-c", source.name, "-o", str(Path(objects) / f"{path}-{source.stem}.o")],
            )
            for path, flags in built.items()
            for source in sources
        ]
        try:
            for job in as_completed(jobs):
                job.result()
        except CompileError:
            pool.shutdown(wait=False, cancel_futures=True)  # what has not begun would be for nothing
            raise
        link_flags = (*LINK_FLAGS, *(LINUX_LINK_FLAGS if sys.platform == "linux" else ()), *extra_flags)
        for path in built:
            unfinished = Path(objects) / f"{path}.so"
            parts = [str(Path(objects) / f"{path}-{source.stem}.o") for source in sources]
            compiler.run([*parts, *link_flags, "-o", str(unfinished)])
            unfinished.replace(library_path(folder, path))
    for path in left_out:
        library_path(folder, path).unlink(missing_ok=True)
    manifest = Manifest(
        source_hash=source_hash(),
        compiler=compiler.version,
        extra_flags=list(extra_flags),
        built=built,
        left_out=left_out,
    )
    manifest.write(folder)
    return manifest


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


def ensure_built(folder: Path, *, warnings: bool = False, sanitize: bool = False) -> Manifest:
    """Builds what is not current; without a compiler keeps what is, or records why there is nothing.

    `warnings` are errors then. Raises CompileError when a source is refused.
    """
    manifest = read_manifest(folder)
    compiler = find_compiler()
    if compiler is None:
        if manifest is not None and manifest.built and manifest.source_hash == source_hash():
            return manifest
        chosen = os.environ.get("CXX", "")
        return record_absence(folder, f"{NO_COMPILER} (CXX={chosen})" if chosen else NO_COMPILER)
    extra_flags = (*(compiler.warning_flags if warnings else ()), *(SANITIZER_FLAGS if sanitize else ()))
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
    """Returns the exit status: 0 also without a compiler, 1 when a source does not compile."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--into", type=Path, default=LIBRARIES, help="the folder (default: beside this file)")
    parser.add_argument("--warnings", action="store_true", help="warnings are errors; for developers")
    parser.add_argument("--sanitize", action="store_true", help="with address and undefined-behaviour sanitizers")
    arguments: Any = parser.parse_args(argv)
    try:
        manifest = ensure_built(arguments.into, warnings=arguments.warnings, sanitize=arguments.sanitize)
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
