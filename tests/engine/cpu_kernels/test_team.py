"""Tests the team of threads with a C++ program that delays members on purpose, also under the thread sanitizer."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from outrider.engine.cpu_kernels.compiler import COMPILE_FLAGS, SOURCE, CompileError, find_compiler

PROGRAM = Path(__file__).with_name("team_program.cpp")
CASES = (
    "more_threads_than_cores",
    "late_workers_hold_up_no_phase",
    "a_unit_that_takes_long_is_waited_for",
    "a_member_begins_with_units_of_its_own",
    "thousands_of_tiny_jobs",
    "members_are_told_apart",
    "destroyed_while_idle",
    "no_more_threads_is_an_error_and_leaves_nothing_behind",
)
LIMIT_SECONDS = 60
RACE = """
#include <thread>
int main() {
  int value = 0;
  std::thread other([&] { value++; });
  value++;
  other.join();
  return value == 3;
}
"""


@pytest.fixture(scope="session", params=["plain", "thread_sanitizer"])
def program(request, tmp_path_factory):
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler")
    flags = [*COMPILE_FLAGS, "-O1", "-g"]
    folder = tmp_path_factory.mktemp("team")
    if request.param == "thread_sanitizer":
        flags.append("-fsanitize=thread")
        if not _catches_a_race(compiler, flags, folder):
            pytest.skip("no working thread sanitizer")
    executable = folder / "team"
    sources = [str(PROGRAM), str(SOURCE / "team.cpp")]
    compiler.run([*flags, f"-I{SOURCE}", *sources, "-o", str(executable)])
    return executable


def _run(*command):
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=LIMIT_SECONDS, env=environment)


def _catches_a_race(compiler, flags, folder):
    """Returns whether the sanitizer detects a known race. If it does not, its silence proves nothing."""
    source, executable = folder / "race.cpp", folder / "race"
    source.write_text(RACE)
    try:
        compiler.run([*flags, str(source), "-o", str(executable)])
    except CompileError:
        return False
    return "data race" in _run(str(executable)).stderr


@pytest.mark.parametrize("case", CASES)
def test_a_team(program, case, request):
    if case.startswith("no_more_threads") and "thread_sanitizer" in request.node.name:
        pytest.skip("the sanitizer itself takes more address space than the case leaves")
    done = _run(str(program), case)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
