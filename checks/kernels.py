"""The native kernels compile without a warning, for every instruction path, also those that this machine cannot run."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from outrider.engine.cpu_kernels.build import CompileError, build, describe, find_compiler


def main() -> int:
    compiler = find_compiler()
    if compiler is None:
        print("kernels: not compiled, there is no C++ compiler")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        try:
            manifest = build(Path(folder), compiler, extra_flags=compiler.warning_flags)
        except CompileError as error:
            print(error)
            return 1
    print(f"kernels: no warning from {compiler.version}; {describe(manifest)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
