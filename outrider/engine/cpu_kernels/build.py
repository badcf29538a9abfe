"""Compiles the kernels ahead of time, into the folder where nodes look for them.

    python -m outrider.engine.cpu_kernels.build [--all]

A node compiles missing libraries when it first starts; `make` and the container image do that in advance.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from outrider.engine.cpu_kernels.compiler import CompileError, path_flags
from outrider.engine.cpu_kernels.library_cache import compile_libraries, libraries_directory


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status.

    With `--all` it is 1 if there is no compiler, a source does not compile or the cache cannot be written. Otherwise it
    is 0, because nodes without a library use torch's kernels.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--all", action="store_true", help="every instruction path, not only this processor's")
    if parser.parse_args(argv).all:
        try:
            libraries, left_out = compile_libraries(path_flags(), progress=_print_progress)
        except (CompileError, OSError) as error:
            print(error, file=sys.stderr)
            return 1
        print(f"native kernels in {libraries_directory()}: {', '.join(libraries) or 'none'}")
        for path, reason in left_out.items():
            print(f"without {path}: {reason}")
        return 0
    from outrider.engine.cpu_kernels.paths import choose_kernels  # needs more than the standard library

    print(choose_kernels(progress=_print_progress))
    return 0


def _print_progress(_stage: str, num_done: int, num_units: int) -> None:
    if num_done in (1, num_units) and num_units:
        print(f"native kernels: {num_done} of {num_units} parts compiled", flush=True)


if __name__ == "__main__":
    sys.exit(main())
