"""Trees of drafts commit the target's distribution: chi-square against float64, with negative controls.

Seeds are fixed, so a test that passes always passes.
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest

from outrider.engine.sampler import SampleRows
from outrider.request import SamplingParams
from outrider.speculation.verify import coupled
from outrider.speculation.verify.base import DraftRows
from outrider.speculation.verify.by_request import RequestVerifier
from tests.speculation.draft_trees import SHAPES
from tests.statistical.chi_square import PASS, probabilities, small_logits, worst_z
from tests.statistical.samplers import sampler_of
from tests.support.verifying import verify_now

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_STREAMS = 64


def generate(logits, *, num_tokens=60, kernels=None, **settings):
    """Returns tokens of streams with equal logits everywhere, [NUM_STREAMS, num_tokens], and tokens per step."""
    sampler = sampler_of(logits, kernels)
    verifier = RequestVerifier(sampler)
    params = SamplingParams(**{"seed": 77, "max_tokens": 1 << 20, **settings})
    states = [sampler.start(params, sample=i, prompt_token_ids=[]) for i in range(NUM_STREAMS)]
    likely = np.argsort(-logits)[:8].tolist()
    row = logits.astype(np.float32)
    texts: list[list[int]] = [[] for _ in states]
    shapes = list(SHAPES.values())
    num_steps = 0
    while min(map(len, texts)) < num_tokens:
        drafts = []
        for i, (state, text) in enumerate(zip(states, texts, strict=True)):
            parents = shapes[(num_steps + i) % len(shapes)]
            siblings = [parents[:index].count(parent) for index, parent in enumerate(parents)]
            token_ids = tuple(likely[number] for number in siblings)
            drafts.append(DraftRows(SampleRows(state, len(text), token_ids), parents=parents))
        num_steps += 1
        num_rows = sum(draft.rows.num_rows for draft in drafts)
        for text, outcome in zip(texts, verify_now(verifier, np.tile(row, (num_rows, 1)), drafts), strict=True):
            text.extend(outcome.token_ids)
    return np.asarray([text[:num_tokens] for text in texts]), sum(map(len, texts)) / num_steps / len(texts)


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7, "top_p": 0.9}], ids=str)
def test_trees_commit_the_targets_distribution(settings, sampler_kernels, is_full):
    logits = small_logits()
    num_tokens = 500 if is_full else 60
    tokens, per_step = generate(logits, num_tokens=num_tokens, kernels=sampler_kernels, **settings)
    assert worst_z(tokens, probabilities(logits, **settings)) < PASS
    assert per_step > 1.1  # otherwise the trees were not tested


def test_races_of_rows_instead_of_positions_are_noticed(monkeypatch):
    """Mistake: a row is decided with the race of its slot's position, so that two positions share a race."""
    runs_of = coupled.runs_of

    def of_slots(draft):
        runs = runs_of(draft)
        firsts = accumulate((run.num_rows for run in runs[:-1]), initial=draft.rows.position)
        return [run._replace(position=first) for run, first in zip(runs, firsts, strict=True)]

    settings = {"temperature": 0.3}  # siblings are accepted often
    probs = probabilities(small_logits(), **settings)
    assert worst_z(generate(small_logits(), num_tokens=120, **settings)[0], probs) < PASS
    monkeypatch.setattr(coupled, "runs_of", of_slots)
    assert worst_z(generate(small_logits(), num_tokens=120, **settings)[0], probs) > PASS


def test_a_second_chance_for_siblings_is_noticed(monkeypatch):
    """Mistake: each sibling is compared with the decisions of all rows, instead of only that of its parent's row."""

    def accept_path(draft_token_ids, parents, decided):
        path, last = [], -1
        for index, parent in enumerate(parents):
            if parent == last and draft_token_ids[index] in decided:
                path.append(index)
                last = index
        return tuple(path)

    def of_tree(draft, decided, logprobs):
        path = accept_path(draft.draft_token_ids, draft.parents, decided)
        token_ids = (*(draft.draft_token_ids[index] for index in path), decided[(path[-1] if path else -1) + 1])
        return coupled.Verified(token_ids, (None,) * len(token_ids), path)

    monkeypatch.setattr(coupled, "_of_tree", of_tree)
    assert worst_z(generate(small_logits())[0], probabilities(small_logits())) > PASS
