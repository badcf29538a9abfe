"""Chats are rendered as transformers does it, even if clients omit members of messages or write them differently."""

import json

import pytest

from outrider.errors import InvalidRequestError
from router.text.chat_template import ChatTemplate

CALL = {"id": "c1", "type": "function", "function": {"name": "w", "arguments": {"city": "é", "days": 2}}}
CHAT = [
    {"role": "user", "content": "weather?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "name": "w", "content": "sunny"},
]
ADDING = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}"
    "{% for call in m.tool_calls %}{{ call.function.name }}(ARGUMENTS){% endfor %}"
    "{% if m.name is defined %}@{{ m.name + '' }}{% endif %}{% endfor %}"
)
AS_OBJECT = ADDING.replace("ARGUMENTS", "{{ call.function.arguments | tojson }}")
AS_TEXT = ADDING.replace("ARGUMENTS", "{{ '' + call['function']['arguments'] }}")
ITEMS = ADDING.replace("ARGUMENTS", "{% for k, v in call.function.arguments | items %}{{ k }}={{ v }};{% endfor %}")


def render(source, messages, *, add_generation_prompt=True, **variables):
    sources = source if isinstance(source, dict) else {"default": source}
    return ChatTemplate(sources, {"bos_token": "<s>"}).render(
        messages, add_generation_prompt=add_generation_prompt, **variables
    )


def rendered_by_transformers(source, messages, **variables):
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    (text,), _ = utils.render_jinja_template([messages], chat_template=source, bos_token="<s>", **variables)
    return text


def test_the_chat_template_renders_as_transformers_renders_it():
    source = (
        "{{ bos_token }}{% for m in messages %}\n    {% if loop.first %}\n{% set ns = namespace(x=1) %}{% endif %}\n"
        "{% generation %}{{ m | tojson }}{% endgeneration %}{% if m.role == 'stop' %}{% break %}{% endif %}\n"
        "{% endfor %}{% if add_generation_prompt %}>>{{ ns is defined }}{% endif %}{{ tools is none }}"
    )
    messages = [
        {"role": "user", "content": "<é> & 'q'"},
        {"role": "stop", "content": "x"},
        {"role": "no", "content": ""},
    ]
    assert render(source, messages) == rendered_by_transformers(source, messages, add_generation_prompt=True)


@pytest.mark.parametrize("source", [AS_OBJECT, ITEMS])
def test_what_a_message_leaves_out_is_an_empty_text(source):
    expected = rendered_by_transformers(source, CHAT)
    assert "<assistant>w(" in expected
    assert render(source, CHAT) == expected
    (user, assistant, tool), arguments = CHAT, json.dumps(CALL["function"]["arguments"])
    as_text = [CALL | {"function": {"name": "w", "arguments": arguments}}]
    for change in (
        {"content": None, "name": None},
        {"content": None, "tool_calls": as_text},
        {"content": [], "tool_calls": as_text, "refusal": None},
        {"content": [{"type": "text", "text": ""}]},
    ):
        assert render(source, [user, assistant | change, tool]) == expected
    without = {name: value for name, value in assistant.items() if name != "content"}
    assert render(source, [user, without, tool | {"content": [{"type": "text", "text": "sunny"}]}]) == expected
    bare = {"role": "assistant", "tool_calls": [{"function": {"name": "w", "arguments": None}}], "content": None}
    assert render(source, [user, bare]).split("w(")[1] in ("{})", ")")


def test_arguments_are_a_text_for_a_template_that_takes_no_object():
    for arguments in ({"a": "é"}, '{"a": "é"}'):
        call = {"function": {"name": "w", "arguments": arguments}}
        text = render(AS_TEXT, [{"role": "assistant", "content": None, "tool_calls": [call]}])
        assert text == '<assistant>w({"a": "é"})'
    call = {"function": {"name": "w", "arguments": "no JSON"}}
    assert "(no JSON)" in render(AS_TEXT, [{"role": "assistant", "tool_calls": [call]}])


def test_what_is_wrong_with_messages_is_told_and_not_that_arguments_are_no_text():
    source = """{% for m in messages %}
    {% for call in m.tool_calls %}{% for name, value in call.function.arguments | items %}{{ name }}{% endfor %}
    {% endfor %}{% if m.role == "x" %}{{ raise_exception("no role x") }}{% endif %}{% endfor %}"""
    call = {"function": {"name": "w", "arguments": {"a": 1}}}
    with pytest.raises(InvalidRequestError, match="no role x"):
        render(source, [{"role": "assistant", "tool_calls": [call]}, {"role": "x", "content": "a"}])


def test_tools_have_the_template_that_is_for_them():
    sources = {"default": "plain", "tool_use": "{{ tools | tojson }}"}
    assert render(sources, CHAT) == "plain"
    assert render(sources, CHAT, tools=[{"name": "w"}]) == '[{"name": "w"}]'
    assert render({"default": "{{ tools | length }}"}, CHAT, tools=[{}]) == "1"
    with pytest.raises(InvalidRequestError, match=r"no chat template 'default' \(it has: rag\)"):
        render({"rag": "x"}, CHAT)


@pytest.mark.parametrize("ending", ["{{ m.content }}<end>", "{{ m.content | trim }}<end>", "{{ m.content }} <end>"])
@pytest.mark.parametrize("content", ["The sky", "The sky ", "say: say:"])
def test_the_last_message_can_be_continued(ending, content):
    source = "{% for m in messages %}<{{ m.role }}>" + ending + "{% endfor %}"
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": content}]
    ours = render(source, messages, add_generation_prompt=False, continue_final_message=True)
    assert ours == rendered_by_transformers(source, messages, continue_final_message=True)
    with pytest.raises(InvalidRequestError, match="cannot be continued"):
        render("{{ messages[0].content }}", messages, continue_final_message=True)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ messages[0].content + 1 }}", {"content": "a"}),
        ("{{ messages[0].content.nope() }}", {"content": "a"}),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", {"content": "a"}),
        ("{{ raise_exception('no') }}", {"content": "a"}),
        ("a", {"content": [{"type": "image_url", "image_url": {}}]}),
        ("a", {"content": [3]}),
    ],
)
def test_what_a_template_refuses_is_the_requests_fault(source, message):
    with pytest.raises(InvalidRequestError) as raised:
        render(source, [{"role": "user", **message}])
    assert (raised.value.field, raised.value.reason) == ("chat.messages", "CHAT_TEMPLATE")


def test_json_takes_its_arguments_by_position_as_in_transformers():
    template = ChatTemplate({"default": "{{ tools | tojson(true, 1) }}"}, {})
    assert template.render([], tools=[{"a": "é"}], add_generation_prompt=False) == '[\n {\n  "a": "\\u00e9"\n }\n]'
