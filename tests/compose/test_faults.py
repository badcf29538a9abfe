"""Containers killed, crashed and frozen in the middle of an answer.

An answer goes on without a changed token as soon as there is a node to go on with; a request that no node comes for in
time is told.
"""

from __future__ import annotations

import time

import pytest

from outrider.errors import OutriderError, PeerLostError
from tests.compose.project import ROLES, START_SECONDS, Project, wait_for, with_models
from tests.compose.story import PROMPT, TOLD_SECONDS, WHOLE_SECONDS, Story, begun_story, unseen

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


def check_told(project, prompt):
    """Checks that a request that cannot be answered ends with an error, and soon."""
    began = time.monotonic()
    with pytest.raises(OutriderError):
        answer(project, prompt)
    assert time.monotonic() - began < TOLD_SECONDS


def exit_code(project, role):
    return project.inspect(role, is_running=False)[0]["State"]["ExitCode"]


# ---------------------------------------------------------------- docker kill


def test_an_answer_loses_no_token_with_a_killed_draft_node(whole, undisturbed, says):
    story = begun_story(whole.target, PROMPT, max_tokens=NUM_TOKENS)
    whole.run("kill", "draft_node")
    assert story.wait(timeout_seconds=WHOLE_SECONDS) == "length"
    assert tuple(story.token_ids) == undisturbed
    assert answer(whole, unseen()).text
    wait_for(lambda: says("decode_node", "draft node lost"), what="the line about the draft node")
    assert exit_code(whole, "draft_node") == KILLED


def test_an_answer_goes_on_without_the_prefill_node_and_a_new_prompt_is_told(whole, says):
    story = begun_story(whole.target, max_tokens=NUM_TOKENS)
    whole.run("kill", "prefill_node")
    check_told(whole, unseen())
    assert story.wait(timeout_seconds=WHOLE_SECONDS) == "length"
    assert len(story.token_ids) == NUM_TOKENS
    assert says("router", "node lost", node="prefill@")
    assert exit_code(whole, "prefill_node") == KILLED


def test_a_prompt_that_a_killed_prefill_node_was_computing_is_computed_again(whole):
    before, prompt = num_admitted(whole), " ".join([unseen()] * 100)  # some seconds of work
    story = Story(whole.target, prompt, max_tokens=16)
    wait_for(lambda: num_admitted(whole) > before, what="the prefill's begin")
    whole.run("kill", "prefill_node")
    bring_back(whole)
    assert story.wait(timeout_seconds=WHOLE_SECONDS) == "length"
    assert tuple(story.token_ids) == tuple(answer(whole, prompt).completions[0].token_ids)


def num_admitted(project):
    return sum(line["event"] == "request admitted" for line in project.logs("router", is_json=True))


def test_requests_of_a_killed_decode_node_are_told_and_up_brings_it_back(whole, says):
    story = begun_story(whole.target)
    whole.run("kill", "decode_node")
    assert isinstance(story.wait(), PeerLostError)
    check_told(whole, unseen())  # nobody is left to decode
    assert says("router", "node lost", node="decode@")
    assert exit_code(whole, "decode_node") == KILLED
    bring_back(whole)
    assert answer(whole, unseen()).text


def test_an_answer_waits_for_the_decode_node_that_up_brings_back(whole, undisturbed):
    story = begun_story(whole.target, PROMPT, max_tokens=NUM_TOKENS)
    whole.run("kill", "decode_node")
    bring_back(whole)
    assert story.wait(timeout_seconds=WHOLE_SECONDS) == "length"
    assert tuple(story.token_ids) == undisturbed


def test_a_prompt_waits_for_the_prefill_node_that_up_brings_back(whole):
    prompt = unseen()
    whole.run("kill", "prefill_node")
    story = Story(whole.target, prompt, max_tokens=16)
    bring_back(whole)
    assert story.wait(timeout_seconds=WHOLE_SECONDS) == "length"
    assert tuple(story.token_ids) == tuple(answer(whole, prompt).completions[0].token_ids)


def test_requests_of_a_killed_router_are_told_and_its_nodes_free_their_work(whole, says):
    story = begun_story(whole.target)
    whole.run("kill", "router")
    assert isinstance(story.wait(), PeerLostError)
    wait_for(lambda: says("decode_node", "session ended"), what="the end of the session")
    assert exit_code(whole, "router") == KILLED
    bring_back(whole)
    assert answer(whole, unseen()).text
    (decode,) = whole.containers("decode_node")
    assert num_running(whole, decode) == 0


def num_running(project, container):
    (value,) = [v for name, v in project.metrics(container).items() if name.startswith("vllm:num_requests_running")]
    return value


# ---------------------------------------------------------------- a crash


def crash(project, role):
    """Kills the service's process; `restart: unless-stopped` starts the container again."""
    (container,) = project.inspect(role)
    project.exec(role, "python", "-c", KILL_ROLE, role, is_checked=False)  # the exec may die with its container
    wait_for(lambda: project.inspect(role)[0]["RestartCount"] > container["RestartCount"], what=f"{role}'s restart")
    assert project.containers(role) == [container["Id"]]


@pytest.mark.parametrize("role", ["draft_node", "prefill_node", "decode_node"])
def test_an_answer_loses_no_token_with_a_node_that_crashes(whole, undisturbed, role):
    story = begun_story(whole.target, PROMPT, max_tokens=NUM_TOKENS)
    crash(whole, role)
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
    assert answer(whole, unseen()).text
    wait_for(lambda: says("router", "node lost", node="draft@"), what="the line about the draft node")


def test_a_frozen_prefill_node_holds_no_request_and_serves_again_when_it_goes_on(whole, paused):
    story = begun_story(whole.target, max_tokens=NUM_TOKENS)
    paused("prefill_node")
    assert answer(whole, unseen()).text  # admitted before the node is taken for lost: the decode node computes it
    assert story.wait(timeout_seconds=WHOLE_SECONDS) == "length"
    paused.go_on()
    whole.wait_until_whole()
    assert answer(whole, unseen()).text


def test_requests_of_a_frozen_decode_node_are_told_and_it_serves_again_when_it_goes_on(whole, paused):
    story = begun_story(whole.target)
    paused("decode_node")
    assert isinstance(story.wait(), PeerLostError)
    check_told(whole, unseen())
    paused.go_on()
    whole.wait_until_whole()
    assert answer(whole, unseen()).text


def test_clients_of_a_frozen_router_are_told_and_it_serves_again_when_it_goes_on(whole, paused, says):
    story = begun_story(whole.target)
    paused("router")
    assert isinstance(story.wait(), PeerLostError)
    wait_for(lambda: says("decode_node", "router is silent"), what="the line about the router")
    paused.go_on()
    whole.wait_until_whole()
    assert answer(whole, unseen()).text
