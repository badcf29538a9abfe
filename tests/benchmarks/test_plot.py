"""The README's chart is drawn from committed figures that the log also has."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DATA = json.loads((ROOT / "benchmarks" / "data" / "peers.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def plot():
    spec = importlib.util.spec_from_file_location("plot", ROOT / "benchmarks" / "plot.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_committed_chart_is_the_one_that_the_command_draws(plot):
    assert plot.draw(DATA) == plot.FIGURE.read_text(encoding="utf-8")


def test_every_figure_stands_in_its_server_s_row_of_the_log_entry():
    logs = [ROOT / "benchmarks" / "LOG.md", *sorted((ROOT / "benchmarks" / "log").glob("*.md"))]
    entries = [entry for log in logs for entry in log.read_text(encoding="utf-8").split("\n## ")]
    command = re.compile(r"\s+".join(map(re.escape, DATA["command"].split())))
    (table,) = (
        entry[found.end() :]
        for entry in entries
        if entry.startswith(f"{DATA['entry']}:") and (found := command.search(entry))
    )
    for number, server in enumerate(DATA["servers"]):
        name = server.replace("Outrider", "ours").replace(" GenAI", "")
        row = next(line for line in table.splitlines() if line.startswith(f"| {name} |"))
        figures = {float(figure) for figure in re.findall(r"\d+(?:\.\d+)?", row)}
        assert {value for panel in DATA["panels"] for value in panel["values"][number]} <= figures
