"""Two of each node: found by their name's addresses, used, and let go; KV through shared memory."""

from __future__ import annotations

import concurrent.futures
import secrets

import pytest

from outrider.client import Client
from tests.compose.project import Project, docker, wait_for, with_models

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1500)]

TWO = ("--scale", "prefill_node=2", "--scale", "decode_node=2", "--scale", "draft_node=2")
ONE = ("--scale", "prefill_node=1", "--scale", "decode_node=1", "--scale", "draft_node=1")
NODES = ("PREFILL", "DECODE", "DRAFT")
MAX_TOKENS = 24
TEXT = (
    "tell me what happened to the people of the old town by the river in the year of the great flood, and who told it"
)


@pytest.fixture(scope="module")
def scaled(models, tmp_path_factory):
    files = ("compose.yaml", "compose.shm.yaml")
    with Project(tmp_path_factory.mktemp("scale"), files=files, override=with_models(models)) as project:
        project.up(*TWO)
        yield project


def ask(target, number):
    """(finish reason, nodes) of one answer whose prompt nobody has seen."""
    with Client(target) as client:
        prompt = f"{secrets.token_hex(8)} {TEXT}"
        result = client.complete(prompt, max_tokens=MAX_TOKENS, ignore_eos=True, timeout_seconds=300)
    return result.completions[0].finished.reason.value, result.summary.metrics.nodes


def ask_many(project, count=12):
    with concurrent.futures.ThreadPoolExecutor(count) as threads:
        return list(threads.map(lambda number: ask(project.target, number), range(count)))


def nodes_of(answers):
    return {name for _, nodes in answers for name in nodes}


def wait_for_nodes(project, count):
    def found():
        serving = {role: project.serving(role) for role in NODES}
        return serving if all(len(names) == count for names in serving.values()) else None

    return wait_for(found, what=f"{count} of each node")


def test_a_new_cluster_of_two_nodes_each_spreads_its_requests(scaled):
    serving = wait_for_nodes(scaled, 2)
    answers = ask_many(scaled)
    assert {reason for reason, _ in answers} == {"length"}
    assert nodes_of(answers) == {*serving["PREFILL"], *serving["DECODE"]}


def test_both_draft_nodes_are_used(scaled):
    for container in scaled.containers("draft_node"):
        assert "decode node connected" in docker("logs", container, is_stderr=True), container


def test_kv_goes_through_shared_memory(scaled):
    for container in scaled.containers("prefill_node"):
        moved = {n: v for n, v in scaled.metrics(container).items() if n.startswith("outrider:kv_transfer_bytes_total")}
        (name,) = moved
        assert 'connector="shared_memory"' in name
        assert moved[name] > 0


def test_nodes_that_are_scaled_away_end_what_they_have_and_are_forgotten(scaled):
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        running = [threads.submit(ask, scaled.target, number) for number in range(8)]
        scaled.up(*ONE)
        answers = [future.result(timeout=300) for future in running]
    assert {reason for reason, _ in answers} == {"length"}
    serving = wait_for_nodes(scaled, 1)
    later = ask_many(scaled, 4)
    assert nodes_of(later) == {*serving["PREFILL"], *serving["DECODE"]}


def test_nodes_that_come_to_a_running_cluster_are_used(scaled):
    before = wait_for_nodes(scaled, 1)
    scaled.up(*TWO)
    serving = wait_for_nodes(scaled, 2)
    new = {name for role in ("PREFILL", "DECODE") for name in serving[role] if name not in before[role]}
    assert len(new) == 2
    assert new <= nodes_of(ask_many(scaled))
