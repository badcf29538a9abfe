"""Two routers with a common store: after one is killed, the other continues its answers."""

from __future__ import annotations

import pytest

from tests.compose.project import Project, free_port, with_models
from tests.compose.story import PROMPT, WHOLE_SECONDS, begun_story

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1500)]

NUM_TOKENS = 1000
"""Number of tokens of an answer, enough to kill its router in the middle."""


@pytest.fixture(scope="module")
def durable(models, tmp_path_factory):
    with Project(tmp_path_factory.mktemp("durable"), override=with_models(models), profiles=("durable",)) as project:
        project.environ |= {"OUTRIDER_ROUTER__STORE": "valkey://valkey", "OUTRIDER_PORT_2": str(free_port())}
        project.up()
        project.wait_until_whole()
        yield project


def test_an_answer_of_a_killed_router_goes_on_at_the_other_one(durable):
    routers = (durable.target, f"127.0.0.1:{durable.environ['OUTRIDER_PORT_2']}")
    whole = durable.answer(PROMPT, max_tokens=NUM_TOKENS, ignore_eos=True)
    story = begun_story(routers, PROMPT, max_tokens=NUM_TOKENS)
    durable.run("kill", "router")
    assert story.wait(timeout_seconds=WHOLE_SECONDS) == "length"
    assert tuple(story.token_ids) == tuple(whole.completions[0].token_ids)
    assert any(line["event"] == "request taken over" for line in durable.logs("router_2", is_json=True))
