"""Blended prompts through the public API, with the default model in four processes."""

from __future__ import annotations

import pytest

from outrider.bench.prompts import DEFAULT_PROMPTS, load_prompts

pytestmark = pytest.mark.real_model

SEPARATOR = "<<>>"


@pytest.fixture(scope="module")
def pieces():
    contents = [prompt.content for prompt in load_prompts(DEFAULT_PROMPTS)]
    texts = [content if isinstance(content, str) else content[0].content for content in contents]
    return [text[:900] for text in texts if len(text) > 900][:4]


def test_answers_say_what_was_reused_and_do_not_depend_on_what_is_cached(real, pieces):
    prompt = SEPARATOR.join([*pieces, " In short:"])
    options = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, "blend_separator": SEPARATOR}
    first, again = (real.client.complete(prompt, **options) for _ in range(2))
    assert first.completions[0].token_ids == again.completions[0].token_ids
    usage = first.summary.usage
    assert usage.num_blended_tokens > usage.num_prompt_tokens // 2
    assert usage.num_recomputed_tokens == pytest.approx(usage.num_blended_tokens * 0.15 / 0.85, abs=1)
    assert again.summary.usage.num_blended_tokens == usage.num_blended_tokens


def test_with_all_tokens_computed_the_answer_is_that_of_full_computation(real, pieces):
    prompt = SEPARATOR.join([*pieces, " In short:"])
    options = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, "top_logprobs": 2}
    blended = real.client.complete(prompt, **options, blend_separator=SEPARATOR, blend_recompute_share=1.0)
    assert blended.summary.usage.num_blended_tokens == 0
    assert blended.summary.usage.num_recomputed_tokens > 0
    lengths = [len(real.client.tokenize(piece)) for piece in pieces]
    tokens = [token for part in (*pieces, " In short:") for token in real.client.tokenize(part)]
    plain = real.client.complete(tokens, **options)
    again = real.client.complete(tokens, **options, blend_piece_lengths=lengths, blend_recompute_share=1.0)
    assert blended.completions[0].token_ids == plain.completions[0].token_ids
    assert again.completions[0].logprobs == plain.completions[0].logprobs == blended.completions[0].logprobs
