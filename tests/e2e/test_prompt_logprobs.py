"""Logprobs of prompts through the public API of real processes."""

from __future__ import annotations

import json
import math

from outrider.cli.main import main

PROMPT = [(i * 7) % 250 + 20 for i in range(120)]
NUM_GENERATED = 40


def test_they_are_those_that_the_same_tokens_had_when_they_were_generated(running):
    generated = running.client.complete(
        PROMPT, temperature=0.0, max_tokens=NUM_GENERATED, ignore_eos=True, top_logprobs=3
    ).completions[0]
    prompt = [*PROMPT, *generated.token_ids]
    for _ in range(2):  # the prompt is cached the second time
        result = running.client.complete(prompt, temperature=0.0, max_tokens=2, prompt_logprobs=3)
        first, *others = result.started.prompt_logprobs
        assert first.token_id == PROMPT[0]
        assert math.isnan(first.logprob)
        assert [entry.token_id for entry in others] == prompt[1:]
        assert tuple(others[-NUM_GENERATED:]) == generated.logprobs
        assert result.summary.usage.num_cached_tokens == 0
    plain = running.client.complete(prompt, temperature=0.0, max_tokens=2)
    assert plain.completions[0].token_ids == result.completions[0].token_ids
    assert plain.started.prompt_logprobs == ()
    assert plain.summary.usage.num_cached_tokens > 0


def test_the_command_line_prints_them(running, capsys):
    target = f"--target={running.cluster.router_address}"
    assert main(["generate", "one two three", target, "--max-tokens=2", "--json", "--prompt-logprobs=1"]) == 0
    answer = json.loads(capsys.readouterr().out)
    entries = answer["prompt_logprobs"]
    assert len(entries) == answer["usage"]["num_prompt_tokens"]
    assert entries[0]["logprob"] is None
    assert all(entry["logprob"] <= 0 and len(entry["top"]) == 1 for entry in entries[1:])
