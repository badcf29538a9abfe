"""The native kernels compile without a warning, for every instruction path, also those that this machine cannot run."""

from __future__ import annotations

import sys

from outrider.engine.cpu_kernels.build import LIBRARIES, CompileError, describe, ensure_built, find_compiler


def main() -> int:
    compiler = find_compiler()
    if compiler is None:
        print("kernels: not compiled, there is no C++ compiler")
        return 0
    try:
        manifest = ensure_built(LIBRARIES)  # those that nodes and tests load: warnings are kept with a library
    except CompileError as error:
        print(error)
        return 1
    if manifest.warnings:
        print(manifest.warnings)
        return 1
    print(f"kernels: no warning from {compiler.version}; {describe(manifest)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
