"""Runs the whole fault matrix and writes its table into docs/reliability.md: `make faults`."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from outrider.bench.machine import describe_machine
from outrider.faults import FAULT_POINTS
from outrider.model_hub.tiny import make_tiny_model
from tests.faults.faulty_cluster import FaultyCluster
from tests.faults.matrix import ACTIONS, CASES, Case, Matrix, Result

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"
BEGIN, END = "<!-- made by `make faults` -->\n", "<!-- end -->\n"


def run_all(directory: Path) -> dict[Case, Result | str]:
    """The result of each case, or what was wrong."""
    results: dict[Case, Result | str] = {}
    with FaultyCluster(make_tiny_model(directory / "model"), directory) as cluster:
        matrix = Matrix(cluster)
        matrix.prepare(CASES)
        for case in CASES:
            started = time.monotonic()
            try:
                results[case] = matrix.run(case)
            except Exception as error:  # noqa: BLE001 the other cases are run all the same
                results[case] = f"{type(error).__name__}: {error}"
            print(f"{case!s:50}{time.monotonic() - started:7.1f} s  {results[case]}", flush=True)
    return results


def table(results: Mapping[Case, Result | str], seconds: float) -> str:
    machine = describe_machine()
    num_good = sum(isinstance(result, Result) for result in results.values())
    cells = {(case.point, case.action): cell(result) for case, result in results.items() if not case.then}
    summary = (
        f"{num_good} of {len(results)} cases passed in {seconds / 60:.0f} minutes on {machine.num_cores} cores "
        f"({machine.processor}), commit {machine.commit or 'unknown'}."
    )
    lines = [
        summary,
        "",
        "| point | " + " | ".join(ACTIONS) + " |",
        "|---" * (1 + len(ACTIONS)) + "|",
        *(
            f"| `{point}` | " + " | ".join(cells.get((point, action), "–") for action in ACTIONS) + " |"
            for point in FAULT_POINTS
        ),
        "",
        "| first | then, to the process that takes over | result |",
        "|---|---|---|",
        *(f"| `{case.point}`, {case.action} | `{case.then}`, {case.action} | {cell(result)} |"
          for case, result in results.items() if case.then),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def cell(result: Result | str) -> str:
    return f"same, {result.gap_seconds:.1f} s" if isinstance(result, Result) else "**failed**"


def write(text: str) -> None:
    before, rest = DOCUMENT.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    DOCUMENT.write_text(before + BEGIN + "\n" + text + "\n" + END + after, encoding="utf-8")


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="outrider-faults-") as directory:
        results = run_all(Path(directory))
    write(table(results, time.monotonic() - started))
    return 0 if all(isinstance(result, Result) for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
