"""Nodes are lost while no process can write its log: the answers are the same, and what is lost is counted."""

from __future__ import annotations

import contextlib
import os
import sys
import urllib.request

import pytest

from tests.faults.faulty_cluster import FaultyCluster
from tests.faults.matrix import CASES, Matrix

CHOSEN = ("decode.step-kill", "prefill.frame-kill")

pytestmark = pytest.mark.timeout(300)  # six processes start


def full_pipe(path) -> int:
    """Its reader, which never reads."""
    os.mkfifo(path)
    descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(descriptor, b"x" * 4096)
    return descriptor


def lost_lines(metrics_address: str) -> float:
    with urllib.request.urlopen(f"http://{metrics_address}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    (found,) = (line for line in lines if line.startswith("outrider:log_lines_lost_total"))
    return float(found.split()[-1])


def test_answers_survive_lost_nodes_when_no_log_can_be_written(tiny_model, tmp_path):
    pipe = tmp_path / "pipe"
    reader = full_pipe(pipe)
    ways = {
        "router": "2>/dev/full",  # a full disk
        "decode_node": "2>&- >&-",  # closed
        "prefill_node": f"2>{pipe} >&2",  # a reader that is stopped
        "draft_node": f"2>{pipe}",
    }

    def command(role: str) -> list[str]:
        return ["sh", "-c", f'exec "$@" {ways.get(role, "")}', "sh", sys.executable, "-P", "-m", role]

    cases = [case for case in CASES if str(case) in CHOSEN]
    assert len(cases) == len(CHOSEN)
    try:
        with FaultyCluster(tiny_model, tmp_path, command=command) as cluster:
            matrix = Matrix(cluster)
            matrix.prepare(cases)
            for case in cases:
                matrix.run(case)
            (router,) = (node for node in cluster.cluster.nodes if node.role == "router")
            assert lost_lines(router.metrics_address) > 10
    finally:
        os.close(reader)
