from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.processes import run_python

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.py"))
MORE_ARGUMENTS = {"watch_cluster": ["2"]}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_runs(cluster, tiny_model, example):
    first = {"draft_client": cluster.node("draft-0").address, "offline_batch": tiny_model}
    argument = first.get(example.stem, cluster.router_address)
    result = run_python(example, argument, *MORE_ARGUMENTS.get(example.stem, []))
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()
