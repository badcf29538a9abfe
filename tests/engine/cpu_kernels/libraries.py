"""Libraries that are built for tests only: kernels of other processors, simulated, and kernels with a mistake."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.engine.cpu_kernels.compiler import SOURCE, X86_64, find_compiler
from outrider.engine.cpu_kernels.library import KernelLibrary
from outrider.engine.cpu_kernels.library_cache import compile_libraries
from outrider.engine.cpu_kernels.paths import PREFERENCE, choose_kernels
from outrider.errors import ConfigError

SIMULATED = Path(__file__).parent / "simulated"
_FROM_SOURCE = os.path.relpath(SIMULATED, SOURCE)  # relative, so that flags are equal in all checkouts
TEST_LIBRARIES = {
    "generic": (),  # portable C++ without AVX2, for other processors
    "simulated_avx512_bf16": ("-march=x86-64-v3", "-include", f"{_FROM_SOURCE}/avx512_bf16.h"),
    "simulated_avx512": (
        "-march=x86-64-v3",
        "-DSIMULATED_WITHOUT_BF16",
        "-include",
        f"{_FROM_SOURCE}/avx512_bf16.h",
    ),
    "simulated_amx": ("-march=x86-64-v3", "-include", f"{_FROM_SOURCE}/amx.h"),
}
NOT_BATCH_INVARIANT = "breaks_the_rule"
_FLAGS = {
    **TEST_LIBRARIES,
    NOT_BATCH_INVARIANT: ("-march=x86-64-v3", "-I.", "-include", f"{_FROM_SOURCE}/breaks_the_rule.h"),
}
_QUICKLY = ("-O1", "-Wno-psabi")  # quick to compile, slow to run
BUILD_SECONDS = 600
"""Seconds that a test with a build may take on a busy machine."""


def _runs_here(path: str) -> bool:
    with contextlib.suppress(ConfigError):
        return bool(choose_kernels(path))
    return False


REAL_PATHS = [path for path in PREFERENCE if _runs_here(path)]  # test_paths skips the others and says why


def _marks(name: str) -> list[pytest.MarkDecorator]:
    marks = [pytest.mark.slow, pytest.mark.timeout(BUILD_SECONDS)]
    return [*marks, pytest.mark.full] if name.removeprefix("simulated_") in REAL_PATHS else marks


PATHS = [
    *(pytest.param(path, id=path) for path in REAL_PATHS),
    *(pytest.param(name, id=name, marks=_marks(name)) for name in TEST_LIBRARIES),
]
"""Parameters of the fixture `library`. Paths that this processor supports are simulated in full runs only."""


def with_few_for_tests(cases: dict[str, tuple], few: tuple[str, ...]) -> list:
    """Returns parameters (library, *case): all cases for the paths that nodes run, only `few` for test libraries."""
    return [
        pytest.param(*path.values, *case, id=f"{path.id}-{name}", marks=path.marks)
        for path in PATHS
        for name, case in cases.items()
        if path.id not in TEST_LIBRARIES or name in few
    ]


def made_library(name: str) -> KernelLibrary:
    """Returns a library, which is compiled unless it is cached."""
    if find_compiler() is None:
        pytest.skip("no C++ compiler")
    headers = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(SIMULATED.iterdir()))).hexdigest()
    with _without_preloaded_sanitizer():  # a flag names the headers' hash
        libraries, left_out = compile_libraries({name: (*_FLAGS[name], *_QUICKLY, f"-DHEADERS_{headers}")})
    if name in left_out:
        assert platform.machine() not in X86_64, left_out[name]
        pytest.skip(left_out[name])
    return KernelLibrary(libraries[name])


@contextlib.contextmanager
def _without_preloaded_sanitizer() -> Iterator[None]:
    """Removes a preloaded sanitizer until the block ends, because it would slow the compiler down."""
    preloaded = os.environ.pop("LD_PRELOAD", None)
    try:
        yield
    finally:
        if preloaded is not None:
            os.environ["LD_PRELOAD"] = preloaded
