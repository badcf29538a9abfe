"""Random requests in bfloat16, each with drafts and without: not one token, log-probability or ending may differ.

`OUTRIDER_SOAK_REQUESTS` sets how many requests the default model gets (a thousand take most of
an hour on two cores).
"""

from __future__ import annotations

import json
import os
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from outrider.cli.bench import DEFAULT_PROMPTS
from outrider.cluster import ClusterConfig
from outrider.model_hub.config import DEFAULT_MODEL_ID
from outrider.model_hub.tiny import make_tiny_model
from tests.conftest import START_SECONDS, RunningCluster

NUM_CLIENTS = 16
REQUEST_SECONDS = 100.0
CHANCE_OF_A_KNOWN_START = 0.5


def sampling_of(choice):
    """Random options of one request; a seed always, for two runs to be comparable."""
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
    }
    return options | {name: value for name, value in rare.items() if choice.random() < 0.15}


def prompt_of(choice, texts):
    """A piece of some text; half of them begin as others do, so that prefixes are found in the caches."""
    text = choice.choice(texts)
    start = 0 if choice.random() < CHANCE_OF_A_KNOWN_START else choice.randrange(len(text) // 2)
    return text[start : start + choice.randrange(20, 900)]


def both_answers(cluster, seed, texts):
    """(with drafts, without, accepted draft tokens) of the request that `seed` makes."""
    choice = random.Random(seed)
    prompt, options = prompt_of(choice, texts), sampling_of(choice)
    most_drafts = choice.choice((1, 2, 4, 8))
    ways = [{"num_speculative_tokens": most_drafts}, {"speculation": False}]
    results = {}
    for way in choice.sample(ways, 2):  # which one finds the other's prefix in the cache is left to chance
        result = cluster.client.complete(prompt, timeout_seconds=REQUEST_SECONDS, **options, **way)
        results["speculation" not in way] = result
    accepted = results[True].summary.metrics.speculation.num_accepted_draft_tokens
    return what_counts(results[True]), what_counts(results[False]), accepted


def what_counts(result):
    return [(c.token_ids, c.text, c.finished.reason, c.finished.stop_string, c.logprobs) for c in result.completions]


def soak(cluster, num_requests, texts):
    """Accepted draft tokens. AssertionError with the request's seed at the first difference."""
    total = 0
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        answers = pool.map(lambda seed: (seed, *both_answers(cluster, seed, texts)), range(num_requests))
        for seed, drafted, plain, accepted in answers:
            assert drafted == plain, f"request {seed}"
            total += accepted
    cluster.wait_until_nothing_is_held()
    return total


def bench_texts():
    entries = [json.loads(line) for line in DEFAULT_PROMPTS.read_text(encoding="utf-8").splitlines()]
    return [entry.get("text") or entry["messages"][-1]["content"] for entry in entries]


def assert_exact(cluster):
    """The claim is made for native kernels; where there are none, this test has nothing to check."""
    descriptions = (dict(node.description) for node in cluster.cluster.nodes)
    numerics = {described["numerics"] for described in descriptions if "numerics" in described}
    assert numerics, "no node has said what its arithmetic promises"
    if not all(name.startswith("exact") for name in numerics):
        pytest.skip(f"no exact numerics here: {numerics}")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("drafter", ["ngram", "another_model"])
def test_random_requests_to_a_tiny_model(start_cluster, tmp_path_factory, drafter, is_full):
    """Random weights accept little and end nowhere in particular: every step mixes all kinds of rows."""
    model = make_tiny_model(tmp_path_factory.mktemp("target"), dtype="bfloat16")
    draft = "ngram"
    if drafter == "another_model":
        draft = f"draft_model:{make_tiny_model(tmp_path_factory.mktemp('draft'), seed=1, dtype='bfloat16')}"
    with start_cluster(ClusterConfig(port=0, draft=draft), f"model.id={model}", "model.num_threads=2") as started:
        started.wait_serving(START_SECONDS)
        cluster = RunningCluster(started)
        assert_exact(cluster)
        assert soak(cluster, 500 if is_full else 50, bench_texts()) > 0


@pytest.mark.real_model
@pytest.mark.timeout(7200)
def test_random_requests_to_the_default_model(start_cluster, is_full):
    with start_cluster(ClusterConfig(port=0), model=DEFAULT_MODEL_ID) as started:
        started.wait_serving(START_SECONDS)
        cluster = RunningCluster(started)
        assert_exact(cluster)
        num_requests = int(os.environ.get("OUTRIDER_SOAK_REQUESTS", "100" if is_full else "12"))
        assert soak(cluster, num_requests, bench_texts()) > 0
