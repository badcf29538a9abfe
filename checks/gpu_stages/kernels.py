"""The project's own tests of GPU kernels: on a GPU all of them, in several processes, since Triton compiles in each.

On a CPU a few run in Triton's interpreter. That of Triton 3.6 needs numpy below 2.4, which `make gpu-replica` puts into
a folder of its own: the machine's numpy is newer, and compiled kernels do not mind.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from checks.gpu_stages.day import Day

GPU_TESTS = ("tests/gpu", "tests/engine/gpu_kernels", "tests/contract/test_attention_backends.py")
CHOSEN = "frames_arrive or bits_in_a_tree_and_in_a_chain or (waits_for_the_gpu_once and triton)"
"""On a CPU."""
NUM_WORKERS = 12
TEST_SECONDS = 90
MAX_NAMED = 40
"""Failed tests with a line of their own."""
INTERPRETER_PACKAGES = Path(sys.prefix, "interpreter")


def run(day: Day) -> None:
    if day.is_gpu:
        _run_tests(day, "-m", "gpu", "-n", str(NUM_WORKERS), "--dist", "worksteal", *GPU_TESTS)
        return
    # All of the GPU's are collected, too, so a package that they miss is noticed.
    _run_tests(day, "-m", "not gpu", "-n", "0", "-k", CHOSEN, *GPU_TESTS, "tests/engine/test_gpu_step.py")


def _run_tests(day: Day, *arguments: str) -> None:
    # -v: a line for each test as it ends, so that a run that is cut off has them too.
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
    """The test, or file, that a line of pytest's says has failed; empty for other lines.

    With -v such a line is "tests/x.py::test FAILED [ 5%]", of several processes "[gw0] [ 5%] FAILED tests/x.py::test".
    """
    words = line.split()
    if not {"FAILED", "ERROR"} & set(words[:4]):
        return ""
    return next((word for word in words if word.startswith("tests/")), "")
