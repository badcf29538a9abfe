"""Every kind of fault at every point of the protocol (`--full`), or a handful: the client is told the same."""

from __future__ import annotations

import contextlib

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
    if "case" not in metafunc.fixturenames:
        return
    is_full = metafunc.config.getoption("--full")
    cases = CASES if is_full else [case for case in CASES if str(case) in HANDFUL]
    metafunc.parametrize("case", cases, ids=str)


@pytest.fixture(scope="module")
def matrix_of(request, tiny_model, tmp_path_factory):
    """matrix_of(case): on a cluster that is started for the first case of its kind."""
    items = [item for item in request.session.items if item.module is request.module and hasattr(item, "callspec")]
    cases = [item.callspec.params["case"] for item in items]
    found = {}
    with contextlib.ExitStack() as stack:

        def find(case):
            if case.needs_store not in found:
                stack.close()  # one cluster at a time
                found.clear()
                folder = tmp_path_factory.mktemp("faults")
                store = stack.enter_context(StoreServer(folder)).url if case.needs_store else ""
                matrix = Matrix(stack.enter_context(FaultyCluster(tiny_model, folder, store=store)))
                matrix.prepare([other for other in cases if other.needs_store == case.needs_store])
                found[case.needs_store] = matrix
            return found[case.needs_store]

        yield find


def test_the_client_is_told_the_same_and_nothing_is_left_behind(matrix_of, case):
    matrix_of(case).run(case)


def test_the_handful_are_cases():
    assert set(HANDFUL) <= {str(case) for case in CASES}
