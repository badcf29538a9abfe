"""Runs the native kernels' tests with libraries that have address and undefined-behaviour sanitizers.

First verifies the sanitizers: two small libraries with one bug each must be caught in the
same environment. Arguments go to pytest.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from outrider.engine.cpu_kernels import build
from outrider.engine.cpu_kernels.compiler import COMPILE_FLAGS, LINK_FLAGS, Compiler, find_compiler
from outrider.engine.cpu_kernels.library_cache import LIBRARIES_VARIABLE

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests" / "engine" / "cpu_kernels"
TURNS = TESTS.parent / "test_cpu_turns.py"
NOT_OVER_LIBRARIES = ("test_build.py", "test_setup.py", "test_team.py")  # run compilers or have their own libraries
SANITIZED = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer", "-g")
MISTAKES = {
    "heap-buffer-overflow": "int outrider_mistake(int n) { int* p = new int[n]; int x = p[n]; delete[] p; return x; }",
    "signed integer overflow": "int outrider_mistake(int n) { return 0x7ffffff0 + (n << 8); }",
}
CALL = "import ctypes, sys; ctypes.CDLL(sys.argv[1]).outrider_mistake(4)"


def main() -> int:
    compiler = find_compiler()
    if compiler is None:
        print("sanitize: there is no C++ compiler")
        return 1
    sanitizing = Compiler((*compiler.command, *SANITIZED), compiler.version)
    with tempfile.TemporaryDirectory(prefix="outrider-sanitized-") as name:
        folder = Path(name)
        compiling = os.environ | {LIBRARIES_VARIABLE: name, "CXX": shlex.join(sanitizing.command)}
        environment = compiling | sanitizer_environment(compiler)
        for kind, source in MISTAKES.items():
            if not is_caught(kind, source, folder, sanitizing, environment):
                print(f"sanitize: a mistake of kind {kind!r} was not caught, so this run would show nothing")
                return 1
        subprocess.run([sys.executable, "-m", build.__name__, "--all"], cwd=ROOT, env=compiling, check=True)
        tests = [str(TESTS), str(TURNS), *(f"--ignore={TESTS / test}" for test in NOT_OVER_LIBRARIES)]
        command = [sys.executable, "-m", "pytest", *tests, "-p", "no:cacheprovider", *sys.argv[1:]]
        return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def sanitizer_environment(compiler: Compiler) -> dict[str, str]:
    """Returns environment variables for a Python that is not sanitized itself.

    It must load the sanitizers' runtime first, and then the C++ runtime, whose `throw` the sanitizers wrap.
    """
    runtimes = [
        subprocess.run(
            [*compiler.command, f"-print-file-name={library}"], check=True, capture_output=True, text=True
        ).stdout.strip()
        for library in ("libasan.so", "libstdc++.so.6")
    ]
    return {
        "LD_PRELOAD": " ".join(runtimes),
        # Leaks found at exit would be Python's own. Tests provoke failed allocations, which must return null.
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


def is_caught(kind: str, source: str, folder: Path, compiler: Compiler, environment: dict[str, str]) -> bool:
    library = folder / "mistake.so"
    (folder / "mistake.cpp").write_text(f'extern "C" __attribute__((visibility("default"))) {source}\n')
    compiler.run([*COMPILE_FLAGS, *LINK_FLAGS, str(folder / "mistake.cpp"), "-o", str(library)])
    command = [sys.executable, "-c", CALL, str(library)]
    result = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    return result.returncode != 0 and kind in result.stderr


if __name__ == "__main__":
    sys.exit(main())
