"""Runs the whole fault matrix and writes its table into docs/faults.md: `make faults`."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from outrider.bench.machine import describe_machine
from outrider.faults import FAULT_POINTS
from tests.faults.faulty_cluster import FaultyCluster
from tests.faults.matrix import ACTIONS, CASES, Case, Matrix
from tests.support.store_server import StoreServer
from tests.support.tiny_model import make_tiny_model

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "faults.md"
DATA = ROOT / "docs" / "data" / "faults.json"
BEGIN, END = "<!-- made by `make faults` -->\n", "<!-- end -->\n"


def run(cases: Sequence[Case], directory: Path) -> dict[str, dict[str, Any]]:
    """Runs all cases, and returns each one's figures or its error, by the case's name."""
    model = make_tiny_model(directory / "model")
    found: dict[str, dict[str, Any]] = {}
    for needs_store, group in groupby(sorted(cases, key=_needs_store), key=_needs_store):
        with ExitStack() as stack:
            store = stack.enter_context(StoreServer(directory)).url if needs_store else ""
            matrix = Matrix(stack.enter_context(FaultyCluster(model, directory, store=store)))
            found.update(_run(matrix, list(group)))
    return found


def _needs_store(case: Case) -> bool:
    return case.needs_store


def _run(matrix: Matrix, cases: Sequence[Case]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    matrix.prepare(cases)
    for case in cases:
        started = time.monotonic()
        try:
            result = asdict(matrix.run(case))
        except Exception as error:  # noqa: BLE001 the other cases still run
            result = {"failure": f"{type(error).__name__}: {error}"}
        found[str(case)] = result
        print(f"{case!s:50}{time.monotonic() - started:7.1f} s  {result}", flush=True)
    return found


def table(data: dict[str, Any]) -> str:
    cells = {name: cell(result) for name, result in data["cases"].items()}
    num_good = sum("failure" not in result for result in data["cases"].values())
    lines = [
        f"{num_good} of {len(cells)} cases passed: {data['machine']}, commit {data['commit']}.",
        "",
        "| point | " + " | ".join(ACTIONS) + " |",
        "| -- " * (1 + len(ACTIONS)) + "|",
        *(
            f"| `{point}` | " + " | ".join(cells.get(f"{point}-{action}", "–") for action in ACTIONS) + " |"
            for point in FAULT_POINTS
        ),
        "",
        "| first | then, to the process that takes over | wait |",
        "| -- | -- | -- |",
        *(
            f"| `{case.point}`, {case.action} | `{case.then}`, {case.action} | {cells[str(case)]} |"
            for case in CASES
            if case.then
        ),
    ]
    return "\n".join(lines) + "\n"


def cell(result: dict[str, Any]) -> str:
    return "**failed**" if "failure" in result else f"{result['gap_seconds']:.1f}"


def write(text: str) -> None:
    before, rest = DOCUMENT.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    DOCUMENT.write_text(before + BEGIN + "\n" + text + "\n" + END + after, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--failed", action="store_true", help="only what failed in the last run, or was not in it")
    arguments = parser.parse_args()
    machine = describe_machine()
    data = {"machine": f"{machine.processor}, {machine.num_cores} cores", "commit": machine.commit, "cases": {}}
    if arguments.failed:
        data = json.loads(DATA.read_text(encoding="utf-8"))
    known = data["cases"]
    cases = [case for case in CASES if "failure" in known.get(str(case), {"failure": "never run"})]
    with tempfile.TemporaryDirectory(prefix="outrider-faults-") as directory:
        known.update(run(cases, Path(directory)))
    DATA.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    write(table(data))
    return int(any("failure" in result for result in known.values()))


if __name__ == "__main__":
    sys.exit(main())
