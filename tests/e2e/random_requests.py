"""Random requests, each sent with drafts and without. With exact numerics, both answers must be equal."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from outrider.bench.prompts import DEFAULT_PROMPTS

NUM_CLIENTS = 16
REQUEST_SECONDS = 240.0
CHANCE_OF_A_KNOWN_START = 0.5


def sampling_of(choice):
    """Returns random options of one request, always with a seed, so that two runs are comparable."""
    options = {
        "temperature": choice.choice((0.0, 0.0, 0.7, 1.0, 1.4)),
        "seed": choice.randrange(1 << 32),
        "max_tokens": choice.randrange(4, 33),
        "n": choice.choice((1, 1, 1, 2)),
        "priority": choice.randrange(-1, 2),
    }
    rare = {
        "top_p": choice.choice((0.5, 0.95)),
        "top_k": choice.choice((5, 40)),
        "min_p": 0.05,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.3,
        "logit_bias": {choice.randrange(200): 5.0},
        "top_logprobs": 2,
        "ignore_eos": True,
        "min_tokens": 3,
        "stop": ["e", "\n\n"],
        "regex": r"([A-Za-z0-9 ,.]{1,60}\n)+",
    }
    return options | {name: value for name, value in rare.items() if choice.random() < 0.15}


def prompt_of(choice, texts):
    """Returns a piece of some text. Half of the pieces share their beginning, so that there are prefix hits."""
    text = choice.choice(texts)
    start = 0 if choice.random() < CHANCE_OF_A_KNOWN_START else choice.randrange(len(text) // 2)
    return text[start : start + choice.randrange(20, 900)]


def both_answers(cluster, seed, texts):
    """Returns (answer with drafts, answer without, verified draft tokens) of the request that `seed` determines."""
    choice = random.Random(seed)
    prompt, options = prompt_of(choice, texts), sampling_of(choice)
    max_drafts = choice.choice((1, 2, 4, 8))
    ways = [{"num_speculative_tokens": max_drafts}, {"speculation": False}]
    results = {}
    for way in choice.sample(ways, 2):  # in random order: the second has a prefix hit
        result = cluster.client.complete(prompt, timeout_seconds=REQUEST_SECONDS, **options, **way)
        results["speculation" not in way] = result
    verified = results[True].summary.metrics.speculation.num_draft_tokens
    return what_counts(results[True]), what_counts(results[False]), verified


def what_counts(result):
    return [(c.token_ids, c.text, c.finished.reason, c.finished.stop_string, c.logprobs) for c in result.completions]


def soak(cluster, num_requests, texts):
    """Sends random requests, and returns the number of verified draft tokens.

    Raises AssertionError with the seed of a request whose answers with and without drafts differ.
    """
    total = 0
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        answers = pool.map(lambda seed: (seed, *both_answers(cluster, seed, texts)), range(num_requests))
        for seed, drafted, plain, verified in answers:
            assert drafted == plain, f"request {seed}"
            total += verified
    cluster.wait_until_nothing_is_held()
    return total


def bench_texts():
    entries = [json.loads(line) for line in DEFAULT_PROMPTS.read_text(encoding="utf-8").splitlines()]
    return [entry.get("text") or entry["messages"][-1]["content"] for entry in entries]


def assert_exact(cluster):
    """Skips the test unless numerics are exact, as those of native kernels are."""
    descriptions = (dict(node.description) for node in cluster.cluster.nodes)
    numerics = {described["numerics"] for described in descriptions if "numerics" in described}
    assert numerics, "no node has said what its arithmetic promises"
    if not all(name.startswith("exact") for name in numerics):
        pytest.skip(f"no exact numerics here: {numerics}")
