"""Checks that the native kernels compile without warnings for all instruction paths, even those unsupported here."""

from __future__ import annotations

import json
import sys

from outrider.engine.cpu_kernels.compiler import CompileError, path_flags
from outrider.engine.cpu_kernels.library_cache import CACHED_ENTRY, compile_libraries


def main() -> int:
    try:
        libraries, left_out = compile_libraries(path_flags())
    except CompileError as error:
        print(error)
        return 1
    entries = [json.loads(library.with_name(CACHED_ENTRY).read_text()) for library in libraries.values()]
    if warnings := "".join(entry["warnings"] for entry in entries):
        print(warnings)
        return 1
    print(f"kernels: no warning from {', '.join(libraries)}", *(f"; without {path}" for path in left_out.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
