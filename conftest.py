"""Orders the tests, skips those that this machine cannot run, and deselects those that only full runs include."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from outrider.engine.device import has_gpu_driver
from tests.support.interpreted_triton import skip_unread_work
from tests.support.matrices import cover_pairs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from xdist.remote import Producer
    from xdist.scheduler.loadscope import LoadScopeScheduling

LAST_FOLDERS = ("statistical", "faults", "e2e", "gpu")
LONG_FILES = (
    "tests/families/test_families.py",
    "tests/router/test_router_process.py",
    "tests/router/durability/test_two_routers.py",
    "tests/speculation/test_source_order.py",
)
"""Test files that take about half a minute each. In alphabetical order they would start late, and one worker
would still run them when the others are done."""
DIVIDED_FILE = "tests/families/test_families.py"
"""The longest file, which takes minutes. Each worker gets the families with some first letters."""
WAITING_FOLDERS = ("client", "cluster", "kv_transfer", "router", "service")
"""Folders whose tests wait more than they compute."""
SHARED_CLUSTER = ("tests/e2e/", "tests/faults/test_lost_stages.py", "tests/training/test_run.py")
"""Tests that share one cluster, which is started once. Under xdist, one worker runs them all."""
OWN_CLUSTER_FILES = ("tests/e2e/test_secured_cluster.py", "tests/e2e/test_soak.py")
"""Exceptions to SHARED_CLUSTER: these files start their own clusters."""
REAL_CLUSTER = (
    *("tests/e2e/test_blend.py", "tests/e2e/test_constraints.py", "tests/e2e/test_openai.py"),
    *("tests/e2e/test_real_model.py", "tests/e2e/test_replay.py"),
)
"""Files that share another cluster, which serves the default model."""


# Garbage collections would take a fifth of the time of imports and test collection, and free only 25 MB.
gc.disable()  # until pytest_collection_finish

# Without a deadline, because one Hypothesis example may take a long time on a busy machine.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")


def pytest_configure(config: pytest.Config) -> None:
    """Limits each xdist worker to one compute thread, unless a test asks for more, and emulates a missing GPU."""
    if hasattr(config, "workerinput"):
        os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
    if not has_gpu_driver():
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton: kernels run on the CPU


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="whole matrices and long soaks, as `make test-all` has them")
    parser.addoption("--rewrite", action="store_true", help="writes the answers in tests/router/scenarios anew")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling | None:
    """Sends all tests of a file to one worker, so that fixtures are set up once, and keeps our order of files.

    Returns None if the command line sets `--dist`, so that xdist schedules by itself.
    """
    if config.getoption("dist") != "load":
        return None
    from xdist.scheduler.loadscope import LoadScopeScheduling

    class FileScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            if path in REAL_CLUSTER:
                return REAL_CLUSTER[0]
            if path == DIVIDED_FILE:
                return path + nodeid.partition("[")[2][:1]
            return SHARED_CLUSTER[0] if path.startswith(SHARED_CLUSTER) and path not in OWN_CLUSTER_FILES else path

    config.option.loadscopereorder = False
    return FileScheduling(config, log)


@pytest.hookimpl(tryfirst=True)  # runs before pytest applies -k and -m, so that they do not change the cases chosen
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Runs quick folders first, so that simple mistakes show within seconds, and tests of whole clusters last.

    Under xdist the cluster tests come first; otherwise one worker would run them at the end while the others are idle.
    """
    items.sort(key=_order_of_workers(items) if hasattr(config, "workerinput") else _rank)  # stable
    _skip_without_cuda([item for item in items if item.get_closest_marker("gpu")])
    if not config.getoption("--full"):
        left_out = {item for item in items if item.get_closest_marker("full")}
        left_out |= _left_out_of_matrices([item for item in items if item not in left_out])
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Excludes the 700,000 objects that exist after the imports from all later garbage collections.

    Also makes triton's interpreter quicker if any of the tests run GPU kernels in it.
    """
    gc.freeze()
    gc.enable()
    if os.environ.get("TRITON_INTERPRET") == "1" and any(item.get_closest_marker("triton") for item in session.items):
        with contextlib.suppress(ModuleNotFoundError):  # without triton these tests are skipped
            skip_unread_work()


def _rank(item: pytest.Item) -> int:
    folder = _folder(item)
    if folder in LAST_FOLDERS:
        return 2 + LAST_FOLDERS.index(folder)
    return int(_file(item) in LONG_FILES)


def _order_of_workers(items: Sequence[pytest.Item]) -> Callable[[pytest.Item], tuple[int, float]]:
    """Returns the sort key under xdist: long files first, then waiting files spread evenly among computing ones."""
    files = {_file(item): _folder(item) in WAITING_FOLDERS for item in items}
    places: dict[str, float] = {}
    for waits in (True, False):
        alike = [file for file in files if files[file] is waits]
        places |= {file: place / len(alike) for place, file in enumerate(alike)}
    return lambda item: (-_rank(item), places[_file(item)])


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def _folder(item: pytest.Item) -> str:
    """Returns the name of the folder below `tests`, or "" if the test is elsewhere."""
    parts = _file(item).split("/")
    return parts[1] if parts[0] == "tests" else ""


def _skip_without_cuda(items: Sequence[pytest.Item]) -> None:
    if not items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in items:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def _left_out_of_matrices(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Returns the cases of each test marked `pairwise` that add no pair of parameter values to the chosen cases."""

    def matrix_of(item: pytest.Item) -> tuple[str, bool]:
        """Groups skipped cases apart from the others, since a case that does not run covers no pair."""
        is_skipped = any(mark.args[0] for mark in item.iter_markers("skipif"))
        return item.nodeid.partition("[")[0], is_skipped

    left_out: set[pytest.Item] = set()
    for _, group in itertools.groupby(
        sorted((item for item in items if item.get_closest_marker("pairwise")), key=matrix_of), key=matrix_of
    ):
        matrix = list(group)
        chosen = cover_pairs([{name: repr(value) for name, value in item.callspec.params.items()} for item in matrix])
        left_out.update(item for index, item in enumerate(matrix) if index not in chosen)
    return left_out
