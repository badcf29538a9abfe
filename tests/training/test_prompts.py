from __future__ import annotations

import random

import jinja2
import pytest

from outrider.errors import ConfigError, InvalidRequestError
from outrider.training.prompts import FilePrompts, OwnPrompts, _open_turn, _tokenize
from tests.support.tiny_model import CHAT_TEMPLATE, tiny_tokenizer

LLAMA2 = (
    "{% for message in messages %}{% if message['role'] == 'user' %}[INST] {{ message['content'] }} [/INST]"
    "{% elif message['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}{% endfor %}"
)


class TokenizingClient:
    """What prompts ask of an AsyncClient: a tokenizer and a template, and an answer to everything."""

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
    from outrider.client import ChatMessage

    client = TokenizingClient(LLAMA2)
    prompt, _ = await _open_turn(client, (ChatMessage("system", "Be brief."),), "Why")
    assert client.text(prompt) == "[INST] Why"


async def test_a_chat_with_a_system_turn_that_the_template_refuses_keeps_the_template():
    from outrider.client import ChatMessage

    chat = (ChatMessage("system", "Be brief."), ChatMessage("user", "Why"))
    for template, expected in ((LLAMA2, "[INST] Why [/INST]"), (None, "Why")):
        client = TokenizingClient(template)
        assert client.text(await _tokenize(client, chat)) == expected


async def test_a_template_that_drops_the_users_text_is_named():
    with pytest.raises(InvalidRequestError, match="leaves out"):
        await _open_turn(TokenizingClient("[INST] [/INST]"), (), "Why")


async def test_what_the_target_wrote_becomes_a_prompt_of_its_kind():
    client = TokenizingClient(CHAT_TEMPLATE)
    source = OwnPrompts(random.Random(1))
    prompts = [await source.next(client) for _ in range(40)]
    assert {prompt.kind for prompt in prompts} == {"chat", "code", "text"}
    texts = [client.text(prompt.token_ids) for prompt in prompts]
    assert all(text.endswith("please.<|im_end|>\n<|im_start|>assistant\n") for text in texts)
    assert len(set(texts)) > 15  # other opening words
    assert all("system" not in text for text in texts)  # which only varied the question
    assert {asked.startswith("<|im_start|>system") for asked, _ in client.asked} == {True, False}
    assert all(options["stop_token_ids"] == [2] for _, options in client.asked)  # <|im_end|>


async def test_users_paste_what_the_target_has_answered():
    client, source = TokenizingClient(CHAT_TEMPLATE), OwnPrompts(random.Random(1))
    source.hear("too short to be pasted")
    source.hear("An article about rivers. " * 20)
    prompts = [await source.next(client) for _ in range(200)]
    pasted = [prompt for prompt in prompts if "about rivers" in client.text(prompt.token_ids)]
    assert {prompt.kind for prompt in pasted} == {"text"}
    assert 20 < len(pasted) < sum(prompt.kind == "text" for prompt in prompts)


async def test_prompts_of_a_file_come_once_in_their_order(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"text": "one"}\n\n{"prompt": "two", "kind": "code"}\n'
        '{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "three"}]}\n'
    )
    client, source = TokenizingClient(CHAT_TEMPLATE), FilePrompts(path)
    found = [await source.next(client) for _ in range(4)]
    assert [each and each.kind for each in found] == ["prompts", "code", "prompts", None]
    assert client.text(found[2].token_ids) == (
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
        FilePrompts(path)


def test_a_file_without_prompts_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        FilePrompts(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="no prompts"):
        FilePrompts(tmp_path / "empty.jsonl")
