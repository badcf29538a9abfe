"""The kernels under test: every path that this machine can run, and libraries that are built for tests only."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from outrider.engine.cpu_kernels import compiler
from outrider.engine.cpu_kernels.kernels import CpuKernels
from outrider.engine.cpu_kernels.library import KernelLibrary
from outrider.engine.cpu_kernels.library_cache import LIBRARIES_VARIABLE
from outrider.engine.cpu_kernels.paths import choose_kernels
from outrider.errors import ConfigError
from tests.engine.cpu_kernels.libraries import NOT_BATCH_INVARIANT, PATHS, TEST_LIBRARIES, made_library


@pytest.fixture(scope="session", autouse=True)
def one_thread_of_torchs():
    """Limits torch, which computes references, to one thread, so that the teams under test keep their cores."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", params=PATHS)
def library(request, made_libraries):
    """The library of each path. For paths that this machine supports, it is the library that nodes load."""
    path = request.param
    if path in TEST_LIBRARIES:
        return made_libraries(path)
    return KernelLibrary(choose_kernels(path).library)


@pytest.fixture(scope="session")
def portable_library():
    try:
        return KernelLibrary(choose_kernels("portable").library)
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def rule_breaking_library(made_libraries):
    """A library without batch invariance: the negative control of every check for batch invariance."""
    return made_libraries(NOT_BATCH_INVARIANT)


@pytest.fixture(scope="session")
def made_libraries() -> Callable[[str], KernelLibrary]:
    """made_libraries(name) → KernelLibrary, compiled on first use."""
    return functools.cache(made_library)


@pytest.fixture(scope="session")
def teams():
    """teams(library, num_threads) → CpuKernels. Each team is started once."""
    started: dict[tuple[Path, int], CpuKernels] = {}

    def kernels(library, num_threads):
        key = library.file, num_threads
        if key not in started:
            started[key] = CpuKernels(library, num_threads)
        return started[key]

    return kernels


@pytest.fixture
def kernels(library, teams):
    """Kernels with one thread."""
    return teams(library, 1)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder for compiled libraries, which does not exist yet."""
    folder = tmp_path / "kernels"
    monkeypatch.setenv(LIBRARIES_VARIABLE, str(folder))
    return folder


@pytest.fixture
def source(tmp_path, monkeypatch, cache):
    """A source folder that has a few functions instead of all kernels, and only one path."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "exports.map").write_bytes((compiler.SOURCE / "exports.map").read_bytes())
    (source / "one.cpp").write_text(
        '#define SHOWN extern "C" __attribute__((visibility("default")))\n'
        "SHOWN int outrider_one() { return 1; }\n"
        "SHOWN int outrider_prepare_process() { return 0; }\n"
        "SHOWN int something_else() { return 2; }\n"
    )
    monkeypatch.setattr(compiler, "SOURCE", source)
    monkeypatch.setattr(compiler, "PROBE", "")
    monkeypatch.setattr(compiler, "X86_PATHS", compiler.OTHER_PATHS)
    return source / "one.cpp"
