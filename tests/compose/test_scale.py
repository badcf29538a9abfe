"""Two nodes of each kind are found by resolving one host name, used and removed; KV goes through shared memory."""

from __future__ import annotations

import concurrent.futures
import contextlib
import secrets
import threading

import pytest

from outrider.client import Client
from tests.compose.project import Project, docker, wait_for, with_models

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1500)]

TWO = ("--scale", "prefill_node=2", "--scale", "decode_node=2", "--scale", "draft_node=2")
ONE = ("--scale", "prefill_node=1", "--scale", "decode_node=1", "--scale", "draft_node=1")
NODES = ("PREFILL", "DECODE", "DRAFT")
MAX_TOKENS = 24
NUM_RUNNING = 8
NUM_COMING = 3
LONG_TOKENS = 200
TEXT = (  # longer than prompts that a decode node computes itself
    "tell me what happened to the people of the old town by the river in the year of the great flood, and who told it"
    " first: the miller, who had seen the water rise, or his daughter, who had not believed him, or the priest"
)


@pytest.fixture(scope="module")
def scaled(models, tmp_path_factory):
    files = ("compose.yaml", "compose.shm.yaml")
    with Project(tmp_path_factory.mktemp("scale"), files=files, override=with_models(models)) as project:
        project.up(*TWO)
        yield project


def ask(target, *, max_tokens=MAX_TOKENS, on_first=lambda: None):
    """Returns (finish reason, nodes) of one answer to a new prompt."""
    prompt = f"{secrets.token_hex(8)} {TEXT}"
    with (
        Client(target) as client,
        client.generate(prompt, max_tokens=max_tokens, ignore_eos=True, timeout_seconds=300) as stream,
    ):
        for _ in stream:
            on_first()
        return stream.finished[0].reason.value, stream.summary.metrics.nodes


def ask_many(project, count=12):
    with concurrent.futures.ThreadPoolExecutor(count) as threads:
        return [future.result() for future in [threads.submit(ask, project.target) for _ in range(count)]]


def ask_until(is_over, target):
    answers = []
    while not is_over.is_set():
        answers.append(ask(target))
    return answers


def nodes_of(answers):
    return {name for _, nodes in answers for name in nodes}


def known_nodes(project):
    with project.client() as client, contextlib.closing(client.watch_cluster(interval_seconds=0.5)) as statuses:
        return {node.name for node in next(statuses).nodes}


def once(action):
    """Returns a function that calls `action` at its first call only."""
    left = [action]
    return lambda: left.pop()() if left else None


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
    before = wait_for_nodes(scaled, 2)
    begun, is_over = threading.Semaphore(0), threading.Event()
    with concurrent.futures.ThreadPoolExecutor(NUM_RUNNING + NUM_COMING) as threads:
        running = [
            threads.submit(ask, scaled.target, max_tokens=LONG_TOKENS, on_first=once(begun.release))
            for _ in range(NUM_RUNNING)
        ]
        for _ in running:
            assert begun.acquire(timeout=120)
        coming = [threads.submit(ask_until, is_over, scaled.target) for _ in range(NUM_COMING)]
        try:
            scaled.up(*ONE)
        finally:
            is_over.set()
        answers = [future.result(timeout=300) for future in running]
        later = [answer for future in coming for answer in future.result(timeout=300)]
    assert len(later) > NUM_COMING
    assert {reason for reason, _ in answers + later} == {"length"}
    serving = wait_for_nodes(scaled, 1)
    gone = {name for role in NODES for name in {*before[role]} - {*serving[role]}}
    assert len(gone) == 3
    assert gone & nodes_of(answers)  # at least one removed node had work
    events = [(event["event"], event.get("node")) for event in scaled.logs("router", is_json=True)]
    assert {node for event, node in events if event == "node left"} >= gone
    assert not any(event == "node lost" for event, _ in events)
    wait_for(lambda: known_nodes(scaled) == {name for role in NODES for name in serving[role]}, what="only those")
    assert nodes_of(ask_many(scaled, 4)) == {*serving["PREFILL"], *serving["DECODE"]}


def test_nodes_that_come_to_a_running_cluster_are_used(scaled):
    before = wait_for_nodes(scaled, 1)
    scaled.up(*TWO)
    serving = wait_for_nodes(scaled, 2)
    new = {name for role in ("PREFILL", "DECODE") for name in serving[role] if name not in before[role]}
    assert len(new) == 2
    assert new <= nodes_of(ask_many(scaled))
