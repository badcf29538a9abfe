from __future__ import annotations

import random

import jinja2
import pytest

from outrider.client import ChatMessage
from outrider.errors import ConfigError, InvalidRequestError
from outrider.training.prompts import _open_turn, read_prompts, tokenize, write_prompt
from tests.support.tiny_model import CHAT_TEMPLATE, tiny_tokenizer

LLAMA2 = (
    "{% for message in messages %}{% if message['role'] == 'user' %}[INST] {{ message['content'] }} [/INST]"
    "{% elif message['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}{% endfor %}"
)


class TokenizingClient:
    """The part of an AsyncClient that prompts use: a tokenizer, a template, and one answer to everything."""

    def __init__(self, template):
        self._tokenizer = tiny_tokenizer()
        self._template = template and jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).from_string(template)
        self.asked = []

    async def tokenize(self, prompt, *, add_generation_prompt=None):
        if not isinstance(prompt, str):
            if self._template is None:
                raise InvalidRequestError("no template", field="chat")
            messages = [{"role": each.role, "content": each.content} for each in prompt]
            try:
                prompt = self._template.render(
                    messages=messages, add_generation_prompt=add_generation_prompt, raise_exception=_refuse
                )
            except jinja2.TemplateError as error:
                raise InvalidRequestError(str(error), field="chat") from error
        return self._tokenizer.encode(prompt, add_special_tokens=False).ids

    def text(self, token_ids):
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    async def complete(self, prompt, **options):
        self.asked.append((self.text(prompt), options))

        class Result:
            text = " would like a long answer to this question, please. "

        return Result()


def _refuse(message):
    raise jinja2.TemplateError(message)


@pytest.mark.parametrize(
    ("template", "opening", "expected"),
    [
        (CHAT_TEMPLATE, "How do I", "<|im_start|>user\nHow do I"),
        (CHAT_TEMPLATE, "", "<|im_start|>user\n"),
        (LLAMA2, "Fix this:\n\n", "[INST] Fix this:\n\n"),
        (None, "Once upon", "Once upon"),
        (None, "", "The"),
    ],
)
async def test_a_users_turn_is_open_at_the_prompts_end(template, opening, expected):
    client = TokenizingClient(template)
    prompt, closing = await _open_turn(client, (), opening)
    assert client.text(prompt) == expected
    assert client.text(closing) == {CHAT_TEMPLATE: "<|im_end|>\n", LLAMA2: " [/INST]", None: ""}[template]


async def test_a_template_without_a_systems_turn_is_used_without_one():
    client = TokenizingClient(LLAMA2)
    prompt, _ = await _open_turn(client, (ChatMessage("system", "Be brief."),), "Why")
    assert client.text(prompt) == "[INST] Why"


async def test_a_chat_with_a_system_turn_that_the_template_refuses_keeps_the_template():
    chat = (ChatMessage("system", "Be brief."), ChatMessage("user", "Why"))
    for template, expected in ((LLAMA2, "[INST] Why [/INST]"), (None, "Why")):
        client = TokenizingClient(template)
        assert client.text(await tokenize(client, chat)) == expected


async def test_a_template_that_drops_the_users_text_is_named():
    with pytest.raises(InvalidRequestError, match="ignores the user"):
        await _open_turn(TokenizingClient("[INST] [/INST]"), (), "Why")


async def test_what_the_target_wrote_becomes_a_prompt_of_its_kind():
    client = TokenizingClient(CHAT_TEMPLATE)
    rng = random.Random(1)
    prompts = [await write_prompt(client, rng, ()) for _ in range(40)]
    assert {kind for kind, _ in prompts} == {"chat", "code", "text", "json", "maths", "languages"}
    texts = [client.text(token_ids) for _, token_ids in prompts]
    assert all(text.endswith("please.<|im_end|>\n<|im_start|>assistant\n") for text in texts)
    assert len(set(texts)) > 15  # they open with different words
    assert all("system" not in text for text in texts)  # system prompts only vary the question
    assert {asked.startswith("<|im_start|>system") for asked, _ in client.asked} == {True, False}
    assert all(options["stop_token_ids"] == [2] for _, options in client.asked)  # <|im_end|>


async def test_users_paste_what_the_target_has_answered():
    client, rng = TokenizingClient(CHAT_TEMPLATE), random.Random(1)
    answers = ["too short to be pasted", "An article about rivers. " * 20]
    prompts = [await write_prompt(client, rng, answers) for _ in range(400)]
    assert not any("too short" in client.text(token_ids) for _, token_ids in prompts)
    pasted = [kind for kind, token_ids in prompts if "about rivers" in client.text(token_ids)]
    assert set(pasted) == {"text"}
    assert 20 < len(pasted) < sum(kind == "text" for kind, _ in prompts)


async def test_prompts_of_a_file_come_once_in_their_order(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"text": "one"}\n\n{"prompt": "two", "kind": "code"}\n'
        '{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "three"}]}\n'
    )
    client, found = TokenizingClient(CHAT_TEMPLATE), read_prompts(path)
    assert [kind for kind, _ in found] == ["prompts", "code", "prompts"]
    assert client.text(await tokenize(client, found[2][1])) == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nthree<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    "line",
    ["[1]", "nonsense", '{"question": "why"}', '{"text": 3}', '{"text": "  "}', '{"messages": [{"role": "user"}]}',
     '{"messages": [{"role": "assistant", "content": "hello"}]}'],
)  # fmt: skip
def test_a_bad_line_is_named_with_what_a_line_is(tmp_path, line):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"text": "one"}\n' + line + "\n")
    with pytest.raises(ConfigError, match=r'line 2: .*"messages"'):
        read_prompts(path)


def test_a_file_without_prompts_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_prompts(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="no prompts"):
        read_prompts(tmp_path / "empty.jsonl")


def test_a_text_may_have_any_ends_of_lines_within(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"text": "one\u2028two\x85three"}\r\n', encoding="utf-8", newline="")
    ((_, (message,)),) = read_prompts(path)
    assert message.content == "one\u2028two\x85three"
