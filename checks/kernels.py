"""The native kernels compile without a warning, for every instruction path, also those that this machine cannot run."""

from __future__ import annotations

import sys

from outrider.engine.cpu_kernels.build import LIBRARIES, describe, ensure_built
from outrider.engine.cpu_kernels.compiler import CompileError, no_compiler


def main() -> int:
    try:
        manifest = ensure_built(LIBRARIES)  # those that nodes and tests load: warnings are kept with a library
    except CompileError as error:
        print(error)
        return 1
    if manifest is None:
        print(f"kernels: not compiled, {no_compiler()}")
        return 0
    if manifest.warnings:
        print(manifest.warnings)
        return 1
    print(f"kernels: no warning from {manifest.compiler}; {describe(manifest)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
