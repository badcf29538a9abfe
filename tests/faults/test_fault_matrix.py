"""Every kind of fault at every point of the protocol (`--full`), or a handful: the client is told the same."""

from __future__ import annotations

import pytest

from tests.faults.faulty_cluster import FaultyCluster
from tests.faults.matrix import CASES, Matrix

HANDFUL = (
    "prefill.frame-kill",
    "decode.first_frame-close",
    "decode.granted-stop",
    "decode.step-kill",
)

pytestmark = pytest.mark.timeout(300)  # the first case starts six processes


def pytest_generate_tests(metafunc):
    if "case" not in metafunc.fixturenames:
        return
    is_full = metafunc.config.getoption("--full")
    cases = CASES if is_full else [case for case in CASES if str(case) in HANDFUL]
    metafunc.parametrize("case", cases, ids=str)


@pytest.fixture(scope="module")
def matrix(request, tiny_model, tmp_path_factory):
    with FaultyCluster(tiny_model, tmp_path_factory.mktemp("faults")) as cluster:
        matrix = Matrix(cluster)
        items = [item for item in request.session.items if item.module is request.module and hasattr(item, "callspec")]
        matrix.prepare([item.callspec.params["case"] for item in items])
        yield matrix


def test_the_client_is_told_the_same_and_nothing_is_left_behind(matrix, case):
    matrix.run(case)


def test_the_handful_are_cases():
    assert set(HANDFUL) <= {str(case) for case in CASES}
