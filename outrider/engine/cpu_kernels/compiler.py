"""This machine's compiler, and the sources and flags that determine a library's content. Standard library only."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).resolve().parent / "source"
SOURCE_SUFFIXES = (".cpp", ".h", ".map")

X86_64 = ("x86_64", "AMD64")
X86_PATHS: Mapping[str, tuple[str, ...]] = {
    "portable": ("-march=x86-64-v3",),
    "avx512": ("-march=x86-64-v4", "-mavx512vnni"),
    "avx512_bf16": ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni"),
    "amx": ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni", "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
}
OTHER_PATHS: Mapping[str, tuple[str, ...]] = {"portable": ()}

# No -ffast-math and no contraction: an expression must round the same way wherever it is used.
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
# The library has its own hidden C++ runtime, which cannot conflict with the one that torch loads.
EXPORTS = "exports.map"
LINUX_LINK_FLAGS = ("-static-libstdc++", "-static-libgcc", f"-Wl,--version-script={EXPORTS}", "-Wl,-z,defs")
WARNING_FLAGS = ("-Wall", "-Wextra")  # stored with the library; checks/kernels.py fails on warnings
# GCC 12 warns about its own _mm512_undefined wherever an intrinsic is inlined (GCC bug 105593), about an ABI that no
# caller sees, and about types local to a source, because a unit includes several sources.
GCC_WARNING_FLAGS = ("-Wno-maybe-uninitialized", "-Wno-psabi", "-Wno-subobject-linkage")
LONG_SOURCES = ("decoder.cpp", "linear.cpp", "paged_attention.cpp")
"""Sources that together take about as long to compile as all others. They form one unit, the others a second one."""

NO_COMPILER = "there is no C++ compiler"
PROBE = "#include <atomic>\nvoid wait(std::atomic<int>& value) { value.wait(0); }\n"  # needs C++20's standard library


class CompileError(Exception):
    """Raised if there is no compiler, or if it rejects a source. In the second case, the message has its output."""


@dataclass(frozen=True, slots=True)
class Compiler:
    command: tuple[str, ...]
    version: str  # the first line of its --version

    @property
    def warning_flags(self) -> tuple[str, ...]:
        return (*WARNING_FLAGS, *(() if "clang" in self.version else GCC_WARNING_FLAGS))

    def knows(self, flags: Sequence[str]) -> str:
        """Returns why the compiler does not accept these flags in the folder of the sources, or an empty string."""
        command = [*self.command, *COMPILE_FLAGS, *flags, "-fsyntax-only", "-x", "c++", "-"]
        result = subprocess.run(command, cwd=SOURCE, input=PROBE, capture_output=True, text=True, check=False)
        return "" if result.returncode == 0 else f"{self.version}: {first_error(result.stderr)}"

    def compile(self, unit: str, arguments: Sequence[str]) -> str:
        """Compiles a unit's text. Returns and raises what `run` does."""
        return self.run(["-c", "-x", "c++", "-", *arguments], unit)

    def run(self, arguments: Sequence[str], text: str = "") -> str:
        """Runs the compiler in the folder of the sources and returns its warnings. Raises: CompileError if it fails."""
        command = [*self.command, *arguments]
        result = subprocess.run(command, cwd=SOURCE, input=text, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise CompileError(f"{shlex.join(command)}\n{result.stderr}")
        return result.stderr


def find_compiler() -> Compiler | None:
    """Returns $CXX or, if that is not set, the first of c++, g++ and clang++ that runs; None if none of these runs."""
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
    """Returns the instruction paths for this type of machine, each with its additional compiler flags."""
    return X86_PATHS if platform.machine() in X86_64 else OTHER_PATHS


def source_units() -> list[str]:
    """Returns the units to compile: texts that include several sources each, so that common headers are read only
    twice.
    """
    names = sorted(path.name for path in SOURCE.glob("*.cpp"))
    units = ([name for name in names if (name in LONG_SOURCES) is are_long] for are_long in (True, False))
    return ["".join(f'#include "{name}"\n' for name in unit) for unit in units if unit]


def source_hash() -> str:
    """Returns the SHA-256 in hexadecimal over all inputs of a library except its flags: the sources and this module."""
    sources = [path for path in SOURCE.iterdir() if path.suffix in SOURCE_SUFFIXES]
    digest = hashlib.sha256()
    for path in (Path(__file__), *sorted(sources)):
        content = path.read_bytes()
        digest.update(f"{path.name}:{len(content)}:".encode() + content)
    return digest.hexdigest()


def no_compiler() -> str:
    """Returns the message for users when there is no compiler."""
    return f"{NO_COMPILER} (CXX={chosen})" if (chosen := os.environ.get("CXX", "")) else NO_COMPILER


def first_error(output: str) -> str:
    lines = [line for line in output.splitlines() if "error:" in line] or output.splitlines() or ["no reason given"]
    return lines[0].strip()
