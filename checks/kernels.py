"""The native kernels compile without a warning, for every instruction path, also those that this machine cannot run."""

from __future__ import annotations

import sys

from outrider.engine.cpu_kernels.compiler import CompileError, path_flags
from outrider.engine.cpu_kernels.library_cache import compiled_libraries


def main() -> int:
    try:
        libraries, left_out = compiled_libraries(path_flags())
    except CompileError as error:
        print(error)
        return 1
    if warnings := "".join(library.warnings for library in libraries.values()):
        print(warnings)
        return 1
    print(f"kernels: no warning from {', '.join(libraries)}", *(f"; without {path}" for path in left_out.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
