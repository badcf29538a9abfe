"""Runs the project's GPU kernel tests. On a GPU, all of them run, in several processes that compile in parallel.

On a CPU, a few tests run in Triton's interpreter. The interpreter of Triton 3.6 needs numpy below 2.4. Since the
machine's numpy is newer, `make gpu-replica` installs an older one into a folder of its own. Compiled kernels work with
both versions.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from checks.gpu_stages.day import Day

GPU_TESTS = ("tests/gpu", "tests/engine/gpu_kernels", "tests/contract/test_attention_backends.py")
CHOSEN = "frames_arrive or bits_in_a_tree_and_in_a_chain or (waits_for_the_gpu_once and triton)"
"""Expression for pytest that selects the tests to run on a CPU."""
NUM_WORKERS = 12
TEST_SECONDS = 90
MAX_NAMED = 40
"""Maximum number of failed tests that are listed, one per line."""
INTERPRETER_PACKAGES = Path(sys.prefix, "interpreter")


def run(day: Day) -> None:
    if day.is_gpu:
        _run_tests(day, "-m", "gpu", "-n", str(NUM_WORKERS), "--dist", "worksteal", *GPU_TESTS)
        return
    # All GPU tests are collected, too, so that missing packages are noticed.
    _run_tests(day, "-m", "not gpu", "-n", "0", "-k", CHOSEN, *GPU_TESTS, "tests/engine/test_gpu_step.py")


def _run_tests(day: Day, *arguments: str) -> None:
    # -v prints a line for each test as it ends, so that a run that is cut off has results, too.
    command = [sys.executable, "-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider"]
    command += ["--timeout", str(TEST_SECONDS), *arguments]
    environ = dict(os.environ)
    if not day.is_gpu and INTERPRETER_PACKAGES.is_dir():
        environ["PYTHONPATH"] = os.pathsep.join([str(INTERPRETER_PACKAGES), environ.get("PYTHONPATH", "")])
    failed: set[str] = set()
    last = ""
    with subprocess.Popen(command, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as tests:
        assert tests.stdout is not None
        for line in tests.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
            name = failed_test(line)
            if name and name not in failed and len(failed) < MAX_NAMED:
                failed.add(name)
                day.tell("failed_test", name=name)
        status = tests.wait()
    day.tell("tests", exit_status=status, summary=last.strip("= "))
    day.expect(f"pytest ends with status {status}: {last}", status == 0)


def failed_test(line: str) -> str:
    """Returns the failed test, or file, in a line of pytest's output; empty for other lines.

    With -v such a line is "tests/x.py::test FAILED [ 5%]", or "[gw0] [ 5%] FAILED tests/x.py::test" with several
    processes.
    """
    words = line.split()
    if not {"FAILED", "ERROR"} & set(words[:4]):
        return ""
    return next((word for word in words if word.startswith("tests/")), "")
