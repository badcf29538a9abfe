"""The profile `openai`: OpenAI's SDK, from outside, through the gateway's container."""

from __future__ import annotations

import json
import time

import openai
import pytest

from tests.compose.project import Project, free_port, wait_for, with_models

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1500)]

MESSAGES = [{"role": "user", "content": "Name three colours."}]
DOWN_SECONDS = 10.0


@pytest.fixture(scope="module")
def up(models, tmp_path_factory):
    directory = tmp_path_factory.mktemp("openai")
    with Project(directory, override=with_models(models), profiles=("openai",)) as project:
        project.environ["OPENAI_PORT"] = str(free_port())
        project.up()
        yield project


@pytest.fixture(scope="module")
def sdk(up):
    url = f"http://127.0.0.1:{up.environ['OPENAI_PORT']}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
        yield client


def ask(sdk):
    (model,) = sdk.models.list()
    answer = sdk.chat.completions.create(model=model.id, messages=MESSAGES, temperature=0, max_tokens=16)
    return answer.choices[0].message.content


def test_a_chat_is_answered_as_soon_as_up_returns(up, sdk):
    by_grpc = up.exec(
        "router",
        *("outrider", "generate", "--chat", MESSAGES[0]["content"], "--max-tokens", "16", "--temperature", "0"),
    )
    assert ask(sdk) == by_grpc.stdout.rstrip("\n")


def test_the_gateway_is_healthy_unprivileged_and_published_on_loopback(up):
    (container,) = up.inspect("openai")
    assert container["State"]["Health"]["Status"] == "healthy"
    assert container["HostConfig"]["CapDrop"] == ["ALL"]
    assert up.exec("openai", "id", "-u").stdout.strip() == "10001"
    (ports,) = (binding for binding in container["HostConfig"]["PortBindings"].values() if binding)
    assert [port["HostIp"] for port in ports] == ["127.0.0.1"]
    networks = container["NetworkSettings"]["Networks"]
    assert not [name for name in networks if name.endswith("_nodes")]


def test_a_router_that_was_restarted_is_found_again(up, sdk):
    before = ask(sdk)
    up.run("restart", "router")

    def is_answered():
        try:
            return ask(sdk) == before
        except openai.APIError:
            return False

    wait_for(is_answered, timeout_seconds=120, what="an answer after the router's restart")


def test_down_takes_no_longer_with_a_gateway(up):
    began = time.monotonic()
    up.run("stop")
    assert time.monotonic() - began < DOWN_SECONDS
    (container,) = up.inspect("openai", is_running=False)
    assert container["State"]["ExitCode"] == 0, json.dumps(container["State"])
