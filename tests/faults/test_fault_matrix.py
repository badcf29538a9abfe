"""Every kind of fault at every point of the protocol (`--full`), or a handful: the client gets the same answer.

The handful runs while no process can write its log.
"""

from __future__ import annotations

import contextlib
import os
import sys
import urllib.request

import pytest

from tests.faults.faulty_cluster import FaultyCluster
from tests.faults.matrix import CASES, Matrix
from tests.support.store_server import StoreServer

HANDFUL = (
    "prefill.frame-kill",
    "decode.first_frame-close",
    "decode.granted-stop",
    "decode.step-kill",
)

pytestmark = pytest.mark.timeout(300)  # the first case starts six processes


def pytest_generate_tests(metafunc):
    """Chooses the cases, and for each one a cluster: (whether it has a store, whether its logs are lost)."""
    if "case" not in metafunc.fixturenames:
        return
    lost = [(case, (False, True)) for case in CASES if str(case) in HANDFUL]
    kept = [(case, (case.needs_store, False)) for case in CASES] if metafunc.config.getoption("--full") else []
    ids = [f"{case}{', logs lost' if loses_logs else ''}" for case, (_, loses_logs) in kept + lost]
    metafunc.parametrize(("case", "cluster_of"), kept + lost, ids=ids)


@pytest.fixture(scope="module")
def matrix_of(request, tiny_model, tmp_path_factory):
    """matrix_of(cluster_of) returns the matrix of this cluster, which is started for its first case."""
    items = [item for item in request.session.items if item.module is request.module and hasattr(item, "callspec")]
    params = [item.callspec.params for item in items]
    found = {}
    with contextlib.ExitStack() as stack:

        def find(cluster_of):
            if cluster_of not in found:
                stack.close()  # one cluster at a time
                found.clear()
                folder = tmp_path_factory.mktemp("faults")
                has_store, loses_logs = cluster_of
                store = stack.enter_context(StoreServer(folder)).url if has_store else ""
                launch = {"command": stack.enter_context(lost_logs(folder / "pipe"))} if loses_logs else {}
                matrix = Matrix(stack.enter_context(FaultyCluster(tiny_model, folder, store=store, **launch)))
                matrix.prepare([each["case"] for each in params if each["cluster_of"] == cluster_of])
                found[cluster_of] = matrix
            return found[cluster_of]

        yield find


@contextlib.contextmanager
def lost_logs(pipe):
    """Yields a `Launch.command` whose processes cannot write their logs. The reader of `pipe` never reads."""
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(reader, b"x" * 4096)
    ways = {
        "router": "2>/dev/full",  # a full disk
        "decode_node": "2>&- >&-",  # closed descriptors
        "prefill_node": f"2>{pipe} >&2",  # a pipe whose reader has stopped
        "draft_node": f"2>{pipe}",
    }

    def command(role):  # `role`: a node, or the process that finds the model
        return ["sh", "-c", 'exec "$@" ' + ways.get(role, ""), "sh", sys.executable, "-P", "-m", role]

    try:
        yield command
    finally:
        os.close(reader)


def num_lost_lines(metrics_address):
    with urllib.request.urlopen(f"http://{metrics_address}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    (found,) = (line for line in lines if line.startswith("outrider:log_lines_lost_total"))
    return float(found.split()[-1])


def test_the_client_is_told_the_same_and_nothing_is_left_behind(matrix_of, case, cluster_of):
    matrix = matrix_of(cluster_of)
    matrix.run(case)
    _, loses_logs = cluster_of
    for router in matrix.cluster.cluster.nodes:
        if router.role == "router":
            assert (num_lost_lines(router.metrics_address) > 0) == loses_logs


def test_the_handful_are_cases():
    assert set(HANDFUL) <= {str(case) for case in CASES if not case.needs_store}
