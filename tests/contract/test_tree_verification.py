"""Draft trees under coupled sampling: the committed tokens are those of decoding token by token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.engine.sampler import SampleRows
from outrider.request import LogprobsRequest, SamplingParams
from outrider.speculation.draft_tree import ROOT, DraftTree
from outrider.speculation.verify.base import DraftRows
from outrider.speculation.verify.by_request import RequestVerifier
from tests.speculation.draft_trees import child, parents_of, trees
from tests.support.sampler_kinds import SamplerOfKind
from tests.support.verifying import verify_now

VOCAB_SIZE = 130
STOP = 3
PARAMETERS = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 20},
    {"temperature": 1.2, "repetition_penalty": 1.5, "frequency_penalty": 2.0, "presence_penalty": 1.0, "min_tokens": 4},
]


@pytest.fixture
def sampler(sampler_kind):
    return SamplerOfKind(sampler_kind, vocab_size=VOCAB_SIZE, known_token_ids=np.ones(VOCAB_SIZE, dtype=np.bool_))


def state_of(sampler, params, logprobs=None):
    params = SamplingParams(**{"seed": 9, "max_tokens": 100, **params})
    return sampler.start(
        params,
        sample=0,
        prompt_token_ids=[1, 2],
        generated_token_ids=[5],
        stop_token_ids=[STOP],
        logprobs=logprobs,
    )


def logits_of(tree, seed):
    """Returns logits of the row after the prefix and of each draft token. Some of the draft tokens are likely."""
    random = np.random.default_rng(seed)
    logits = random.standard_normal((len(tree) + 1, VOCAB_SIZE)).astype(np.float32) * 2
    for parent, token_id in zip(parents_of(tree), tree.token_ids, strict=True):
        if random.random() < 0.6:
            logits[parent + 1, token_id] += 8.0
    logits[:, STOP] += 6.0  # the stop token is likely, but forbidden at first by min_tokens
    return torch.from_numpy(logits)


def plain(sampler, state, tree, logits):
    """Returns (committed tokens, indices of the draft tokens among them), deciding tokens one at a time."""
    committed, path, row = [], [], ROOT
    while True:
        rows = SampleRows(state, 20 + len(committed), assumed_token_ids=tuple(committed))
        (token_id,) = sampler.sample(logits[row + 1 : row + 2], [rows]).token_ids
        committed.append(token_id)
        row = child(tree, row, token_id)
        if row is None:
            return tuple(committed), tuple(path)
        path.append(row)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tree=trees(), params=st.sampled_from(PARAMETERS), seed=st.integers(0, 1000))
def test_any_tree_commits_what_decoding_token_by_token_commits(sampler, tree, params, seed):
    state, logits = state_of(sampler, params), logits_of(tree, seed)
    expected, path = plain(sampler, state, tree, logits)
    chain = DraftTree(0, token_ids=(4, 5))
    before, outcome, after = verify_now(
        RequestVerifier(sampler),
        torch.cat([logits_of(chain, seed), logits, logits[:1]]),
        [
            DraftRows(SampleRows(state, 7, chain.token_ids)),
            DraftRows(SampleRows(state, 20, tree.token_ids), parents=tree.parents),
            DraftRows(SampleRows(state, 20)),
        ],
    )
    assert outcome.token_ids == expected
    assert outcome.num_accepted == len(path)
    assert not tree.parents or outcome.path == path
    assert after.token_ids == expected[:1]
    assert before.path == ()


def test_committed_tokens_of_a_tree_have_the_logprobs_of_their_rows(sampler):
    logits = torch.full((4, VOCAB_SIZE), -20.0)
    logits[range(4), [6, 9, 8, 10]] = 20.0
    state = state_of(sampler, {}, LogprobsRequest(num_top=1))
    draft = DraftRows(SampleRows(state, 20, (7, 6, 8)), parents=(-1, -1, 1))
    (outcome,) = verify_now(RequestVerifier(sampler), logits, [draft])
    assert (outcome.token_ids, outcome.path) == ((6, 8, 10), (1, 2))
    assert [each.token_id for each in outcome.logprobs] == [6, 8, 10]
    assert [each.logprob for each in outcome.logprobs] == pytest.approx([0.0] * 3, abs=1e-5)
