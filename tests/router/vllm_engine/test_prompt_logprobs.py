"""Logprobs of a prompt, by the engine service."""

from __future__ import annotations

import pytest

from tests.router.vllm_engine.test_servicer import PROMPT, ask


@pytest.mark.parametrize("stream", [True, False])
async def test_logprobs_of_the_prompt_come_once(serving, stream):
    chunks, (complete,) = await ask(serving, stream=stream, prompt_logprobs=1)
    (found,) = (each.input_logprobs for each in (*chunks, complete) if each.HasField("input_logprobs"))
    assert list(found.token_ids) == PROMPT
    values = [each.value if each.HasField("value") else None for each in found.token_logprobs]
    assert values == [None, *(-token_id / 8 for token_id in PROMPT[1:])]
    assert [len(each.values) for each in found.top_logprobs] == [0] + [1] * (len(PROMPT) - 1)
