from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.py"))
MORE_ARGUMENTS = {"watch_cluster": ["2"]}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_runs(cluster, tiny_model, example):
    first = {"draft_client": cluster.node("draft-0").address, "offline_batch": tiny_model}
    argument = first.get(example.stem, cluster.router_address)
    command = [sys.executable, example, argument, *MORE_ARGUMENTS.get(example.stem, [])]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()
