"""The gateway's reasoning parsers do not mistake a constrained answer for reasoning."""

from __future__ import annotations

import json

import openai
import pytest

from tests.router.api.vllm_engine.smg_process import MODEL, gateway_before
from tests.router.threaded_router import ThreadedRouter
from tests.support.router_fakes import fake_tokenizer_files
from tests.support.router_fakes.model import CHAT_TEMPLATE

TOGGLE = CHAT_TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
OPEN = CHAT_TEMPLATE.replace("assistant\\n' -}}", "assistant\\n<think>\\n' -}}")
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
NAMED = {"type": "function", "function": {"name": "f"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
CONSTRAINTS = {
    "regex": ({"extra_body": {"regex": ".*"}}, "aaa"),
    "ebnf": ({"extra_body": {"ebnf": "start: /a+/"}}, "aaa"),
    "json_schema": ({"response_format": SCHEMA}, "{}"),
    "json_object": ({"response_format": {"type": "json_object"}}, "{}"),
    "off": ({"extra_body": {"regex": ".*", "chat_template_kwargs": {"enable_thinking": False}}}, "aaa"),
    "required": ({"tools": [TOOL], "tool_choice": "required"}, '[{"name":"f","parameters":{}}]'),
    "named": ({"tools": [TOOL], "tool_choice": NAMED}, "{}"),
}


def router_with(template, parser):
    config = {"eos_token": "<|endoftext|>", "chat_template": template}
    files = fake_tokenizer_files() | {
        "tokenizer_config.json": json.dumps(config).encode(),
        "chat_template.jinja": template.encode(),
    }
    return ThreadedRouter(tokenizer_files=files, reasoning_parser=parser)


@pytest.fixture(
    scope="module",
    params=[("deepseek_r1", CHAT_TEMPLATE), ("qwen3", TOGGLE), ("qwen3_thinking", OPEN)],
    ids=["always", "toggle", "open"],
)
def thinking(request):
    """Yields (router, client)."""
    parser, template = request.param
    router = router_with(template, parser)
    try:
        with gateway_before(router, reasoning_parser=parser) as client:
            yield router, client
    finally:
        router.stop()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("options", "says"), CONSTRAINTS.values(), ids=CONSTRAINTS)
def test_a_constrained_answer_is_no_thought(thinking, options, says, stream):
    router, client = thinking
    decode = router.cluster.decode
    decode.script = lambda _opened, _sample: [*says.encode(), 256]
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 60, **options}
    content, thoughts, calls = "", "", []
    if stream:
        for chunk in client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **asked):
            for choice in chunk.choices:
                content += choice.delta.content or ""
                thoughts += getattr(choice.delta, "reasoning_content", "") or ""
                calls += [call.function for call in choice.delta.tool_calls or ()]
            usage = chunk.usage
    else:
        answer = client.chat.completions.create(**asked)
        message, usage = answer.choices[0].message, answer.usage
        content, thoughts = message.content or "", getattr(message, "reasoning_content", "") or ""
        calls = [call.function for call in message.tool_calls or ()]
    if "tools" in options:
        assert "".join(call.name or "" for call in calls) == "f"
        assert "".join(call.arguments or "" for call in calls) == "{}"
        assert content == ""
    else:
        assert content == says
    assert thoughts == ""
    tags = len("<think></think>") if stream else 0  # the gateway counts all text of a stream
    assert 0 <= usage.completion_tokens - (len(says) + 1) <= tags
    prompt = bytes(token_id for token_id in decode.opened[-1].prompt_token_ids if token_id < 256)
    assert prompt.endswith(b"<think>\n\n</think>\n\n")
    assert prompt.count(b"<think>") == 1


def test_without_a_constraint_the_model_thinks(thinking):
    router, client = thinking
    router.cluster.decode.script = lambda _opened, _sample: [*b"hm</think>\n\nso", 256]
    (choice,) = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "x"}], max_tokens=60
    ).choices
    assert (choice.message.reasoning_content, choice.message.content.strip()) == ("hm", "so")


def test_a_stop_that_the_empty_thought_has_is_refused(thinking):
    _, client = thinking
    with pytest.raises(openai.BadRequestError, match="precedes a constrained answer"):
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "x"}], stop=["<"], extra_body={"regex": "a"}
        )


def test_a_parser_with_tags_of_its_own_is_not_together_with_constraints():
    router = router_with(CHAT_TEMPLATE, "kimi")
    try:
        with (
            gateway_before(router, reasoning_parser="kimi") as client,
            pytest.raises(openai.BadRequestError, match="the reasoning parser kimi may mistake a constrained answer"),
        ):
            client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "x"}], max_tokens=4, extra_body={"regex": "a"}
            )
    finally:
        router.stop()
