"""The compiler of this machine, and everything that decides what it makes: sources and flags. Standard library only."""

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
WARNING_FLAGS = ("-Wall", "-Wextra")  # warnings are kept with the library: errors for developers, not for users
# GCC 12 takes its own _mm512_undefined for a mistake wherever an intrinsic is inlined (GCC bug 105593), and tells
# of an ABI that no caller sees, and of types that only one source sees, because a unit includes it.
GCC_WARNING_FLAGS = ("-Wno-maybe-uninitialized", "-Wno-psabi", "-Wno-subobject-linkage")
LONG_SOURCES = ("decoder.cpp", "linear.cpp", "paged_attention.cpp")
"""They take about as long to compile as all others: the sources are compiled as two units, these and the others."""

NO_COMPILER = "there is no C++ compiler"
PROBE = "#include <atomic>\nvoid wait(std::atomic<int>& value) { value.wait(0); }\n"  # what needs C++20 of the library


class CompileError(Exception):
    """There is no library to be had: no compiler, or one that refuses a source; its output is the message."""


@dataclass(frozen=True, slots=True)
class Compiler:
    command: tuple[str, ...]
    version: str  # the first line of its --version

    @property
    def warning_flags(self) -> tuple[str, ...]:
        return (*WARNING_FLAGS, *(() if "clang" in self.version else GCC_WARNING_FLAGS))

    def knows(self, flags: Sequence[str]) -> str:
        """Empty, or the reason why these flags do not work in the folder of the sources."""
        command = [*self.command, *COMPILE_FLAGS, *flags, "-fsyntax-only", "-x", "c++", "-"]
        result = subprocess.run(command, cwd=SOURCE, input=PROBE, capture_output=True, text=True, check=False)
        return "" if result.returncode == 0 else f"{self.version}: {first_error(result.stderr)}"

    def compile(self, unit: str, arguments: Sequence[str]) -> str:
        """As `run`, of a source's text."""
        return self.run(["-c", "-x", "c++", "-", *arguments], unit)

    def run(self, arguments: Sequence[str], text: str = "") -> str:
        """Runs in the folder of the sources; returns the warnings. Raises CompileError."""
        command = [*self.command, *arguments]
        result = subprocess.run(command, cwd=SOURCE, input=text, capture_output=True, text=True, check=False)
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


def source_units() -> list[str]:
    """What is compiled: texts that include several sources each, so that common headers are read only twice."""
    names = sorted(path.name for path in SOURCE.glob("*.cpp"))
    units = ([name for name in names if (name in LONG_SOURCES) is are_long] for are_long in (True, False))
    return ["".join(f'#include "{name}"\n' for name in unit) for unit in units if unit]


def source_hash(inputs: Sequence[Path] = ()) -> str:
    """SHA-256 in hexadecimal over everything that libraries are made of: sources, this module, and further `inputs`."""
    sources = [path for path in SOURCE.iterdir() if path.suffix in SOURCE_SUFFIXES]
    digest = hashlib.sha256()
    for path in (Path(__file__), *sorted(sources), *sorted(inputs)):
        content = path.read_bytes()
        digest.update(f"{path.name}:{len(content)}:".encode() + content)
    return digest.hexdigest()


def no_compiler() -> str:
    """The reason, for people."""
    return f"{NO_COMPILER} (CXX={chosen})" if (chosen := os.environ.get("CXX", "")) else NO_COMPILER


def first_error(output: str) -> str:
    lines = [line for line in output.splitlines() if "error:" in line] or output.splitlines() or ["no reason given"]
    return lines[0].strip()
