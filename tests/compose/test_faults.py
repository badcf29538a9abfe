"""Containers killed, crashed and frozen in the middle of an answer: what Docker adds to `tests/faults`."""

from __future__ import annotations

import pytest

from outrider.errors import PeerLostError
from tests.compose.project import ROLES, START_SECONDS, Project, wait_for, with_models
from tests.compose.story import PROMPT, WHOLE_SECONDS, begun_story, unseen

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1500)]

NUM_TOKENS = 1000
"""Long enough for a fault in the middle."""
KILLED = 137
KILL_ROLE = """
import os, pathlib, signal, sys
for entry in pathlib.Path("/proc").iterdir():
    if entry.name.isdigit() and int(entry.name) not in (1, os.getpid()):
        if (entry / "cmdline").read_bytes().split(b"\\0")[1:3] == [b"-m", sys.argv[1].encode()]:
            os.kill(int(entry.name), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def cluster(models, tmp_path_factory):
    with Project(tmp_path_factory.mktemp("faults"), override=with_models(models)) as project:
        project.up()
        yield project


@pytest.fixture(scope="module")
def undisturbed(cluster):
    """Tokens of the answer that the tests disturb."""
    return tuple(answer(cluster, PROMPT, max_tokens=NUM_TOKENS).completions[0].token_ids)


@pytest.fixture
def whole(cluster):
    bring_back(cluster)
    return cluster


def bring_back(project):
    """Starts what was killed. Not `--wait`, which gives up at once on a router that says it has no nodes."""
    project.run("up", "--detach", timeout=START_SECONDS)
    project.wait_until_whole(timeout_seconds=START_SECONDS)


@pytest.fixture
def says(whole):
    """says(role, event, key=beginning of its value): whether a role has logged this since the test began."""
    num_before = {role: len(whole.logs(role, is_json=True)) for role in ROLES}

    def says(role, event, **values):
        return any(
            line["event"] == event and all(str(line.get(key, "")).startswith(value) for key, value in values.items())
            for line in whole.logs(role, is_json=True)[num_before[role] :]
        )

    return says


@pytest.fixture
def paused(whole):
    """pause(role); it goes on after the test at the latest."""
    roles = []

    def pause(role):
        whole.run("pause", role)
        roles.append(role)

    def go_on():
        while roles:
            whole.run("unpause", roles.pop())

    pause.go_on = go_on
    yield pause
    go_on()


def answer(project, prompt, *, max_tokens=16):
    with project.client() as client:
        return client.complete(prompt, max_tokens=max_tokens, temperature=0, timeout_seconds=120, ignore_eos=True)


def exit_code(project, role):
    return project.inspect(role, is_running=False)[0]["State"]["ExitCode"]


# ---------------------------------------------------------------- docker kill


def test_an_answer_waits_for_the_decode_node_that_up_brings_back(whole, undisturbed):
    story = begun_story(whole.target, PROMPT, max_tokens=NUM_TOKENS)
    whole.run("kill", "decode_node")
    assert exit_code(whole, "decode_node") == KILLED
    bring_back(whole)
    assert story.wait(timeout_seconds=WHOLE_SECONDS) == "length"
    assert tuple(story.token_ids) == undisturbed


# ---------------------------------------------------------------- a crash


def crash(project, role):
    """Kills the service's process; `restart: unless-stopped` starts the container again."""
    (container,) = project.inspect(role)
    project.exec(role, "python", "-c", KILL_ROLE, role, is_checked=False)  # the exec may die with its container
    wait_for(lambda: project.inspect(role)[0]["RestartCount"] > container["RestartCount"], what=f"{role}'s restart")
    assert project.containers(role) == [container["Id"]]


def test_an_answer_waits_for_the_decode_node_that_docker_restarts(whole, undisturbed):
    story = begun_story(whole.target, PROMPT, max_tokens=NUM_TOKENS)
    crash(whole, "decode_node")
    assert story.wait(timeout_seconds=WHOLE_SECONDS) == "length"
    assert tuple(story.token_ids) == undisturbed
    whole.wait_until_whole(timeout_seconds=START_SECONDS)


def test_a_router_that_crashes_is_started_again(whole):
    crash(whole, "router")
    whole.wait_until_whole(timeout_seconds=START_SECONDS)
    assert answer(whole, unseen()).text


# ---------------------------------------------------------------- docker pause


def test_an_answer_loses_no_token_with_a_frozen_draft_node(whole, undisturbed, paused, says):
    story = begun_story(whole.target, PROMPT, max_tokens=NUM_TOKENS)
    paused("draft_node")
    assert story.wait(timeout_seconds=WHOLE_SECONDS) == "length"
    assert tuple(story.token_ids) == undisturbed
    wait_for(lambda: says("router", "node lost", node="draft@"), what="the line about the draft node")


def test_clients_of_a_frozen_router_are_told_and_it_serves_again_when_it_goes_on(whole, paused, says):
    story = begun_story(whole.target)
    paused("router")
    assert isinstance(story.wait(), PeerLostError)
    wait_for(lambda: says("decode_node", "router is silent"), what="the line about the router")
    paused.go_on()
    whole.wait_until_whole()
    assert answer(whole, unseen()).text
