from __future__ import annotations

import time

import pytest
import torch

from outrider.training.hidden_states import CLIENTS, RowPrices, median_seconds
from outrider.training.replay import HEAD, LOOKUP, Walk, noise_given, replay
from outrider.training.report import ReportFacts, speedup, write_report
from tests.training.toy import HIDDEN, VOCAB, ToyTarget, toy_dataset, toy_student

TEXT = [9, 9, 1, 2, 3, 4, 5, 6, 7, 8]  # a prompt of two tokens, an answer of eight


def test_a_walk_counts_as_one_does_by_hand():
    """Right about 2, 3, 5 and 6 only. k = 2, from 1 on: [2 3] 4 | [5 6] 7 | then 8 is too near the end."""
    walk = Walk()
    walk.add(TEXT, 2, 2, [[token if token in {2, 3, 5, 6} else 0 for token in TEXT[known:]] for known in range(10)])
    assert (walk.num_steps, walk.num_tokens, walk.tried, walk.accepted) == (2, 6, [2, 2], [2, 2])
    assert walk.tokens_per_step == 3.0
    walk = Walk()
    walk.add(TEXT, 2, 2, [[token, 0] for token in TEXT])
    # [2 -] 3 | [4 -] 5 | [6 -] 7 | one token is left.
    assert (walk.num_steps, walk.num_tokens, walk.tried, walk.accepted) == (3, 6, [3, 3], [3, 0])


def test_a_walk_without_drafts_makes_a_token_a_step():
    walk = Walk()
    walk.add(TEXT, 2, 1, [()] * 10)
    assert walk.tokens_per_step == 1.0
    assert walk.tried == [0]


def test_noise_makes_the_chosen_token_win_and_is_gumbel_noise():
    logits = torch.randn(1, 7).expand(30_000, 7)
    generator = torch.Generator().manual_seed(0)
    chosen = torch.multinomial(torch.softmax(logits[0], -1), 30_000, replacement=True, generator=generator)
    noise = noise_given(logits, chosen, generator)
    assert ((logits + noise).argmax(-1) == chosen).all()
    assert abs(noise.mean().item() - 0.5772) < 0.02  # over all tokens that may be chosen it is free noise again
    assert abs(noise.var().item() - 1.6449) < 0.05


class Oracle(torch.nn.Module):
    """Drafts what the toy target says, by the token of each row's feature and nothing else."""

    def __init__(self):
        super().__init__()
        self.vocabulary = toy_student("medusa").vocabulary
        self.target = ToyTarget()

    def start(self, features, *, first=0):
        tokens = torch.cdist(features[0, :, :HIDDEN], self.target.embedding()).argmin(-1)
        self.tokens = torch.tensor([self.target.follower(int(token)) for token in tokens])  # of the row itself

    def step(self, chains, token_ids):
        self.tokens = torch.tensor([self.target.follower(int(token)) for token in self.tokens])
        return torch.nn.functional.one_hot(self.tokens, VOCAB).float()[None] * 1000

    def logits(self, hidden, depth):
        return hidden


def test_chains_are_placed_where_their_tokens_are(plan_of):
    dataset = toy_dataset(plan_of())
    results = replay(Oracle(), ToyTarget(), dataset, dataset.held_out, most=3)
    walks = {key: walk for key, walk in results.items() if key[2] == HEAD}
    assert walks
    for (_, _, _, k), walk in walks.items():
        assert walk.tokens_per_step == k + 1
    assert all(walk.tokens_per_step < 2 for key, walk in results.items() if key[2:] == (LOOKUP, 3))  # little repeats


def test_a_sampled_answer_is_drafted_with_the_noise_that_drew_it(plan_of):
    """The head gives the target's own logits: coupled to the same noise it is always right."""
    dataset, target = toy_dataset(plan_of()), ToyTarget()

    class Same(Oracle):
        def step(self, chains, token_ids):
            super().step(chains, token_ids)
            final = target.output_layer()[self.tokens]  # the hidden state that chooses this token
            return torch.nn.functional.linear(final, target.output_layer())[None]

    texts = [text for text in dataset.held_out if dataset.index.temperatures[text] > 0]
    assert texts
    for (_, temperature, source, k), walk in replay(Same(), target, dataset, texts, most=2).items():
        assert temperature == 1.0
        if source == HEAD:
            assert walk.tokens_per_step == k + 1


def test_the_report_says_what_was_counted():
    prices = RowPrices({clients: [0.010, 0.012, 0.014] for clients in CLIENTS})
    head_seconds = dict.fromkeys(CLIENTS, 0.002)
    assert speedup(1.8, 2, 1, prices, 0.002) == pytest.approx(1.8 * 0.010 / 0.018)
    results = {
        ("chat", 0.0, source, k): Walk(30, 20 - 4 * k, [10, 8][:k], [8, 2][:k])
        for source in ("head", "lookup", "lookup, then head")
        for k in (1, 2)
    }
    facts = ReportFacts(title="toy", lines=["a fact"], prices=prices, head_seconds=head_seconds)
    report = write_report(facts, results)
    assert "- a fact" in report
    assert "| head | 1.88 | 2.50 |" in report  # 30 / 16, 30 / 12
    assert "| chat | 0.80 | 0.25 |" in report  # 8 of 10, 2 of 8
    assert f"| chat | {2.5 * 10 / 14:.2f} (lookup, k = 2) |" in report  # as good as both here, and free
    assert "| 16 | 10.00 | 12.00 | 14.00 | 2.00 |" in report
    assert "Medians, with the processor's caches flushed before each" in report


def test_a_step_is_timed_alone_each_time_after_the_caches_are_flushed(monkeypatch):
    now, calls = [0.0], []
    steps = iter([50.0, 3.0, 9.0, 4.0, 30.0, 5.0])  # the first warms up

    def flush():
        calls.append("flush")
        now[0] += 1000.0

    def step():
        calls.append("step")
        now[0] += next(steps)

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    assert median_seconds(step, flush, 1.0) == 5.0
    assert calls == ["step", *["flush", "step"] * 5]
