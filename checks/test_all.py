"""Runs all tests, and reports at the end which were skipped and why. Arguments go to pytest.

The tests are the suite with complete matrices and long soaks, the native kernels' tests with
sanitized libraries, the GPU kernels compiled ahead of time, and clusters of containers. Parts
that this machine cannot run are skipped and named, which is not a failure; a failed part does
not stop the next.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree as ET

from outrider.engine.cpu_kernels.compiler import find_compiler

ROOT = Path(__file__).resolve().parent.parent
NO_TESTS_COLLECTED = 5  # pytest's exit status


@dataclass
class Part:
    """One command that runs tests, and its results."""

    name: str
    command: list[str]
    is_pytest: bool = True
    why_left_out: str = ""
    status: int = 0
    seconds: float = 0.0
    num_passed: int = 0
    num_failed: int = 0
    skipped: Counter[str] = field(default_factory=Counter)  # number of tests by reason

    def run(self, folder: Path) -> None:
        report = folder / f"{len(list(folder.iterdir()))}.xml"
        started_at = time.monotonic()
        print(f"==== {self.name}", flush=True)
        command = [*self.command, f"--junitxml={report}"] if self.is_pytest else self.command
        self.status = subprocess.run(command, cwd=ROOT, check=False).returncode
        self.seconds = time.monotonic() - started_at
        if report.exists():
            self._read(report)
        if self.status == NO_TESTS_COLLECTED:  # the arguments select tests of another part
            self.status, self.why_left_out = 0, "no test is chosen by the arguments"
        elif self.status == 0 and self.num_passed == 0 and self.skipped:
            self.why_left_out = "; ".join(self.skipped)

    def _read(self, report: Path) -> None:
        for case in ET.parse(report).iter("testcase"):  # noqa: S314 pytest wrote it just now
            skipped = case.find("skipped")
            if skipped is not None:
                self.skipped[skipped.get("message", "")] += 1
            elif case.find("failure") is not None or case.find("error") is not None:
                self.num_failed += 1
            else:
                self.num_passed += 1

    def __str__(self) -> str:
        if self.why_left_out:
            return f"left out  {self.name}: {self.why_left_out}"
        result = "passed" if self.status == 0 else "FAILED"
        if not self.is_pytest:
            return f"{result:8s}  {self.name}: {self.seconds:.0f} s, exit status {self.status}"
        counts = f"{self.num_passed} passed, {self.num_failed} failed, {self.skipped.total()} skipped"
        return f"{result:8s}  {self.name}: {counts}, {self.seconds:.0f} s, exit status {self.status}"


def main() -> int:
    arguments = sys.argv[1:]
    pytest = [sys.executable, "-m", "pytest"]
    whole = ["--full", "-n", "2", "--ignore=tests/compose"]
    parts = [
        Part("the suite, with whole matrices and long soaks", [*pytest, *whole, *arguments]),
        Part("native kernels with sanitizers", [sys.executable, "checks/sanitize.py", "--full", *arguments]),
        Part("GPU kernels compiled ahead of time", [sys.executable, "checks/gpu_kernels.py"], is_pytest=False),
        Part("clusters of containers", [*pytest, "-m", "compose", "tests/compose", *arguments]),
    ]
    parts[1].why_left_out = why_no_sanitizers()
    parts[2].why_left_out = "" if find_spec("triton") else "triton is not installed"
    with tempfile.TemporaryDirectory(prefix="outrider-test-all-") as folder:
        for part in parts:
            if not part.why_left_out:
                part.run(Path(folder))
    print("\n==== what ran")
    for part in parts:
        print(part)
    print("\n==== single tests that were left out, and why")
    for part in parts:
        for reason, count in part.skipped.items() if not part.why_left_out else ():
            print(f"{count:6d}  {reason} ({part.name})")
    return max(part.status != 0 for part in parts)


def why_no_sanitizers() -> str:
    """Returns why there are no sanitizers, or "" if there is a compiler with sanitizers."""
    compiler = find_compiler()
    if compiler is None:
        return "no C++ compiler here"
    command = [*compiler.command, "-print-file-name=libasan.so"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return "" if Path(found).is_absolute() else f"{compiler.version} has no address sanitizer"


if __name__ == "__main__":
    sys.exit(main())
