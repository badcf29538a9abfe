"""OpenAI's own SDK with the gateway of `outrider up --openai` and the default model, even if a node dies."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import jsonschema
import openai
import pytest

from outrider.client import AsyncClient, ChatMessage
from outrider.cluster.child import ChildState
from tests.support.cluster_nodes import wait_for_node

pytestmark = pytest.mark.real_model

WAIT_SECONDS = 120.0
QUESTION = "Describe the sea in two sentences, then repeat them word for word."
MESSAGES = [{"role": "user", "content": QUESTION}]
OURS = [ChatMessage("user", QUESTION)]
NUM_STREAMS = 32
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model(real):
    return real.client.model().name


@pytest.fixture(scope="module")
def sdk(real):
    url = real.cluster.openai_url
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=WAIT_SECONDS) as client:
        yield client


@pytest.fixture(scope="module")
def chat(sdk, model):
    def chat(**options):
        options = {"model": model, "messages": MESSAGES, "max_tokens": 48, **options}
        return sdk.chat.completions.create(**options)

    return chat


def test_the_documented_example_runs(real, capsys):
    page = (Path(__file__).resolve().parents[2] / "docs/clients/openai.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    exec(example.replace("http://127.0.0.1:8000/v1", real.cluster.openai_url), {})
    assert re.search(r"\n48 tokens\n$", capsys.readouterr().out)


def test_the_model_has_the_same_name_by_both_doors(sdk, model):
    assert [listed.id for listed in sdk.models.list()] == [model]


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_chat_is_that_of_grpc_with_drafts_and_without(real, chat, temperature):
    theirs = chat(temperature=temperature, seed=11)
    sampling = {"temperature": temperature, "seed": 11, "max_tokens": 48}
    for speculation in (True, False):
        ours = real.client.complete(OURS, speculation=speculation, **sampling)
        assert theirs.choices[0].message.content == ours.text
        assert theirs.choices[0].finish_reason == ours.completions[0].finished.reason.value
        assert theirs.usage.prompt_tokens == ours.summary.usage.num_prompt_tokens
        assert theirs.usage.completion_tokens == ours.summary.usage.num_generated_tokens
    details = theirs.usage.completion_tokens_details
    assert details.accepted_prediction_tokens + details.rejected_prediction_tokens > 0


def test_a_completion_with_samples_and_a_stop(real, sdk, model):
    prompt, sampling = "Once upon a time", {"max_tokens": 24, "seed": 3, "n": 2}
    ours = [completion.text for completion in real.client.complete(prompt, **sampling).completions]
    theirs = sdk.completions.create(model=model, prompt=prompt, **sampling)
    assert [choice.text for choice in theirs.choices] == ours
    assert ours[0] != ours[1]
    stop = ours[0].split()[5]
    (cut,) = sdk.completions.create(model=model, prompt=prompt, stop=[stop], **{**sampling, "n": 1}).choices
    assert (cut.text, cut.finish_reason) == (ours[0][: ours[0].index(stop)], "stop")


def test_a_stream_with_its_usage(chat):
    whole = chat(seed=5)
    text, usages = "", []
    for chunk in chat(seed=5, stream=True, stream_options={"include_usage": True}):
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usages += [chunk.usage] if chunk.usage else []
    assert text == whole.choices[0].message.content
    assert [usage.completion_tokens for usage in usages] == [whole.usage.completion_tokens]


def test_logprobs(real, chat):
    theirs = chat(temperature=0, max_tokens=8, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    ours = real.client.complete(OURS, temperature=0, max_tokens=8, top_logprobs=2).completions[0].logprobs
    assert [token.logprob for token in theirs] == pytest.approx([token.logprob for token in ours], abs=1e-6)
    for mine, other in zip(ours, theirs, strict=True):
        assert [top.logprob for top in other.top_logprobs] == pytest.approx([top[1] for top in mine.top], abs=1e-6)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_in_a_schema_is_that_of_grpc(real, chat, stream):
    response_format = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}
    answer = chat(seed=3, max_tokens=80, response_format=response_format, stream=stream)
    if stream:
        text = "".join(choice.delta.content or "" for chunk in answer for choice in chunk.choices)
    else:
        text = answer.choices[0].message.content
    ours = real.client.complete(OURS, seed=3, max_tokens=80, json_schema=json.dumps(SCHEMA), speculation=False)
    assert text == ours.text
    jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_tool_is_called(chat, choice):
    tool = {"type": "function", "function": {"name": "weather", "description": "Of a city", "parameters": SCHEMA}}
    (answer,) = chat(seed=3, max_tokens=80, tools=[tool], tool_choice=choice).choices
    assert answer.finish_reason == "tool_calls"
    assert {call.function.name for call in answer.message.tool_calls} == {"weather"}
    for call in answer.message.tool_calls:
        jsonschema.validate(json.loads(call.function.arguments), SCHEMA)


async def test_many_streams_at_once_are_those_of_grpc(real, model):
    """Each stream has its own seed. Both APIs are called at the same time."""

    async def theirs(sdk, seed):
        stream = await sdk.chat.completions.create(
            model=model, messages=MESSAGES, max_tokens=12, seed=seed, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])

    async def ours(client, seed):
        return (await client.complete(OURS, max_tokens=12, seed=seed)).text

    url = real.cluster.openai_url
    async with (
        openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=WAIT_SECONDS) as sdk,
        AsyncClient(real.router_address) as client,
    ):
        by_http = asyncio.gather(*(theirs(sdk, seed) for seed in range(NUM_STREAMS)))
        by_grpc = asyncio.gather(*(ours(client, seed) for seed in range(NUM_STREAMS)))
        assert await by_http == await by_grpc


def test_a_decode_node_that_is_killed_in_a_stream_is_not_noticed(real, chat):
    options = {"seed": 21, "max_tokens": 96, "extra_body": {"ignore_eos": True}}
    whole = chat(**options).choices[0].message.content
    text = ""
    for number, chunk in enumerate(chat(stream=True, **options)):
        text += chunk.choices[0].delta.content or ""
        if number == 5:
            real.cluster.kill("decode-0")
    assert text == whole
    wait_for_node(real.cluster, "decode-0", lambda node: node.num_restarts == 1 and node.state is ChildState.SERVING)


def test_a_client_that_leaves_frees_its_request(real, chat):
    stream = chat(stream=True, max_tokens=4000, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    real.wait_until_nothing_is_held()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"model": "another"}, openai.NotFoundError, "another"),
        ({"max_tokens": 900_000}, openai.BadRequestError, "exceed the window of 8192"),
        ({"extra_body": {"regex": "[a"}}, openai.BadRequestError, "the regex cannot be compiled"),
        ({"messages": [{"role": "user", "content": "sea " * 9000}]}, openai.BadRequestError, "8192"),
    ],
    ids=["model", "max_tokens", "regex", "prompt"],
)
def test_errors_have_openais_form(chat, options, error, message):
    with pytest.raises(error, match=message):
        chat(**options)
