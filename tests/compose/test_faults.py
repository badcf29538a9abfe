"""Containers killed, crashed and frozen in the middle of an answer: what Docker adds to `tests/faults`."""

from __future__ import annotations

import pytest

from outrider.errors import PeerLostError
from tests.compose.project import START_SECONDS, Project, wait_for, with_models
from tests.compose.story import PROMPT, WHOLE_SECONDS, begun_story, unseen

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1500)]

NUM_TOKENS = 1000
"""Number of tokens of an answer, enough for a fault in the middle."""
KILLED = 137
KILL_ROLE = """
import os, pathlib, signal, sys
for entry in pathlib.Path("/proc").iterdir():
    if entry.name.isdigit() and int(entry.name) not in (1, os.getpid()):
        if (entry / "cmdline").read_bytes().split(b"\\0")[1:4] == [b"-P", b"-m", sys.argv[1].encode()]:
            os.kill(int(entry.name), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def cluster(models, tmp_path_factory):
    with Project(tmp_path_factory.mktemp("faults"), override=with_models(models)) as project:
        project.up()
        yield project


@pytest.fixture(scope="module")
def undisturbed(cluster):
    """Returns the tokens of the answer that the tests disturb."""
    return tuple(cluster.answer(PROMPT, max_tokens=NUM_TOKENS, ignore_eos=True).completions[0].token_ids)


@pytest.fixture
def whole(cluster):
    bring_back(cluster)
    return cluster


def bring_back(project):
    """Starts the killed containers. It does not use `--wait`, which fails immediately if a router says that it has no
    nodes.
    """
    project.run("up", "--detach", timeout=START_SECONDS)
    project.wait_until_whole(timeout_seconds=START_SECONDS)


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


def test_an_answer_waits_for_the_decode_node_that_docker_restarts(whole, undisturbed):
    """The node's process is killed, and `restart: unless-stopped` starts the container again."""
    role = "decode_node"
    story = begun_story(whole.target, PROMPT, max_tokens=NUM_TOKENS)
    (container,) = whole.inspect(role)
    whole.exec(role, "python", "-c", KILL_ROLE, role, is_checked=False)  # the exec may die with its container
    wait_for(lambda: whole.inspect(role)[0]["RestartCount"] > container["RestartCount"], what=f"{role}'s restart")
    assert whole.containers(role) == [container["Id"]]
    assert story.wait(timeout_seconds=WHOLE_SECONDS) == "length"
    assert tuple(story.token_ids) == undisturbed
    whole.wait_until_whole(timeout_seconds=START_SECONDS)


# ---------------------------------------------------------------- docker pause


def test_clients_of_a_frozen_router_are_told_and_it_serves_again_when_it_goes_on(whole):
    num_before = len(whole.logs("decode_node", is_json=True))
    story = begun_story(whole.target)
    whole.run("pause", "router")
    try:
        assert isinstance(story.wait(), PeerLostError)
        wait_for(
            lambda: (
                "router is silent" in [line["event"] for line in whole.logs("decode_node", is_json=True)[num_before:]]
            ),
            what="the line about the router",
        )
    finally:
        whole.run("unpause", "router")
    whole.wait_until_whole()
    assert whole.answer(unseen(), ignore_eos=True).text
