from __future__ import annotations

from collections import Counter

import jinja2
import pytest
import tokenizers

from outrider.bench.prompts import DEFAULT_PROMPTS as PROMPTS
from outrider.bench.prompts import load_prompts


def test_there_are_enough_different_prompts_of_each_kind():
    prompts = load_prompts(PROMPTS)
    counts = Counter(prompt.kind for prompt in prompts)
    assert set(counts) == {"chat", "extract", "code"}
    assert min(counts.values()) >= 8
    assert counts.total() >= 24
    assert len({prompt.id for prompt in prompts}) == len(prompts)
    assert len({prompt.content for prompt in prompts}) == len(prompts)


@pytest.mark.real_model
def test_every_prompt_has_200_to_330_tokens():
    from outrider.model_hub.config import ModelConfig
    from outrider.model_hub.locate import locate_model

    folder = locate_model(ModelConfig()).directory
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(
        (folder / "chat_template.jinja").read_text(encoding="utf-8")
    )
    for prompt in load_prompts(PROMPTS):
        text = prompt.content
        if not isinstance(text, str):
            messages = [{"role": message.role, "content": message.content} for message in text]
            text = template.render(messages=messages, add_generation_prompt=True)
        assert 200 <= len(tokenizer.encode(text).ids) <= 330, prompt.id
