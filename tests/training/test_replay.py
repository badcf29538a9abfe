from __future__ import annotations

import math
import time

import numpy as np
import pytest
import torch

from outrider.speculation.draft_tree import num_common
from outrider.training.hidden_states import CLIENTS, median_seconds
from outrider.training.replay import HEAD, LOOKUP, noise_given, replay, walk
from outrider.training.report import acceptance, speedup, tokens_per_step, write_report
from outrider.training.student import Student
from outrider.training.trainer import HistoryPoint
from tests.training.toy import HIDDEN, VOCAB, ToyTarget, toy_dataset, toy_student

TEXT = [9, 9, 1, 2, 3, 4, 5, 6, 7, 8]  # a prompt of two tokens, an answer of eight


def right_of(drafts):
    """Returns, by number of known tokens, how many leading tokens of the draft agree with the text."""
    return [num_common(draft, TEXT[known:]) for known, draft in enumerate(drafts)]


def test_a_walk_counts_as_one_does_by_hand():
    """Only tokens 2, 3, 5 and 6 are right. With k = 2, steps after 1: [2 3] 4 | [5 6] 7. 8 is too near the end."""
    drafts = [[token if token in {2, 3, 5, 6} else 0 for token in TEXT[known:]] for known in range(10)]
    assert walk(right_of(drafts), 2, 2) == [2, 2]
    # Steps: [2 -] 3 | [4 -] 5 | [6 -] 7. One token is left.
    assert walk(right_of([[token, 0] for token in TEXT]), 2, 2) == [1, 1, 1]


def test_a_walk_without_drafts_makes_a_token_a_step():
    assert walk(right_of([()] * 10), 2, 1) == [0] * 6


def test_figures_are_of_steps_by_their_right_drafts():
    counts = np.array([0, 3, 1])  # no step with 0 right draft tokens, three with 1, one with 2
    assert tokens_per_step(counts) == 9 / 4
    assert acceptance(counts) == [4 / 4, 1 / 4]
    assert math.isnan(tokens_per_step(np.zeros(3)))
    np.testing.assert_equal(acceptance(np.array([4, 0, 0])), [0.0, math.nan])


def test_noise_makes_the_chosen_token_win_and_is_gumbel_noise():
    logits = torch.randn(1, 7).expand(30_000, 7)
    generator = torch.Generator().manual_seed(0)
    chosen = torch.multinomial(torch.softmax(logits[0], -1), 30_000, replacement=True, generator=generator)
    noise = noise_given(logits, chosen, generator)
    assert ((logits + noise).argmax(-1) == chosen).all()
    assert abs(noise.mean().item() - 0.5772) < 0.02  # averaged over the chosen tokens, it is plain Gumbel noise again
    assert abs(noise.var().item() - 1.6449) < 0.05


class Oracle:
    """Drafts the toy target's next token from the token of each row's feature."""

    draft = Student.draft

    def __init__(self):
        student = toy_student("eagle3")
        self.device, self.target_ids = student.device, student.target_ids
        self.target_output = student.target_output
        self.target = ToyTarget()

    def start(self, features, contexts, lengths):
        tokens = torch.cdist(features[:, :HIDDEN], self.target.embedding()).argmin(-1)
        self.tokens = torch.tensor([self.target.follower(int(token)) for token in tokens])  # follow the rows' tokens

    def step(self, chains, token_ids):
        self.tokens = torch.tensor([self.target.follower(int(token)) for token in self.tokens])

    def logits(self, chains):
        return torch.nn.functional.one_hot(self.tokens, VOCAB).float() * 1000, None


def test_chains_are_placed_where_their_tokens_are(plan_of):
    dataset = toy_dataset(plan_of())
    results = replay(Oracle(), ToyTarget(), dataset, dataset.held_out, max_k=3)
    assert results
    for counts in results.values():
        for k in (1, 2, 3):
            assert tokens_per_step(counts[HEAD, k - 1]) == k + 1
        assert tokens_per_step(counts[LOOKUP, 2]) < 2  # little repeats


def test_a_sampled_answer_is_drafted_with_the_noise_that_drew_it(plan_of):
    """A head with the target's own logits, coupled to the same noise, is always right."""
    dataset, target = toy_dataset(plan_of()), ToyTarget()

    class Same(Oracle):
        def logits(self, chains):
            final = target.output_layer()[self.tokens]  # the hidden state that chooses this token
            return torch.nn.functional.linear(final, target.output_layer()), None

    texts = [text for text in dataset.held_out if dataset.text(text).temperature > 0]
    assert texts
    for (_, temperature), counts in replay(Same(), target, dataset, texts, max_k=2).items():
        assert temperature == 1.0
        assert [tokens_per_step(steps) for steps in counts[HEAD]] == [2, 3]


STEPS = np.array([[[2, 8, 0], [2, 6, 2]]] * 3)  # numbers of steps by source, k - 1 and number of right tokens
ROW_SECONDS = [[0.010, 0.012, 0.014]] * len(CLIENTS)
HEAD_SECONDS = [0.002] * len(CLIENTS)
POINT = HistoryPoint(
    seconds=9.0, step=7, passes=0.5, loss=[2.0], held_out_loss=[2.5], acceptance=[0.4], kinds={"chat": [[2.25], [0.3]]}
)


def test_the_report_says_what_was_counted():
    assert speedup(1.8, 2, ROW_SECONDS[0], 2 * 0.002) == pytest.approx(1.8 * 0.010 / 0.018)
    report = write_report("toy", ["a fact"], {("chat", 0.0): STEPS}, ROW_SECONDS, HEAD_SECONDS, POINT)
    assert "- a fact" in report
    assert "| chat | 2.25 | 0.30 |\n| all kinds | 2.50 | 0.40 |" in report
    assert "| head | 1.80 | 2.00 |" in report  # 18 / 10, 20 / 10
    assert "| chat | 0.80 | 0.25 |" in report  # 8 of 10, 2 of 8
    assert f"| chat | {1.8 * 10 / 12:.2f} (lookup, k = 1) |" in report  # as good as with the head, and free
    assert "| 16 | 10.00 | 12.00 | 14.00 | 2.00 |" in report
    assert "The processor's caches are flushed before each step" in report


def test_a_head_that_drafts_at_once_is_paid_once_a_step():
    steps = np.array([[[2, 8, 0], [0, 1, 9]]] * 3)
    report = write_report("toy", [], {("chat", 0.0): steps}, ROW_SECONDS, HEAD_SECONDS, POINT, num_at_once=2)
    assert f"| chat | {2.9 * 10 / 14:.2f} (lookup, k = 2) |" in report
    steps[LOOKUP] = [[9, 1, 0], [9, 1, 0]]
    report = write_report("toy", [], {("chat", 0.0): steps}, ROW_SECONDS, HEAD_SECONDS, POINT, num_at_once=2)
    assert f"| chat | {2.9 * 10 / 16:.2f} (lookup, then head, k = 2) |" in report


def test_all_kinds_are_summed_whatever_they_are_called():
    results = {("all", 0.0): STEPS, ("a|b", 0.0): np.array([[[8, 2, 0], [6, 2, 2]]] * 3)}
    report = write_report("toy", [], results, ROW_SECONDS, HEAD_SECONDS, POINT)
    assert "Kinds of held-out answers: all / a|b / all kinds." in report
    assert "| head | 1.80 / 1.20 / 1.50 | 2.00 / 1.60 / 1.80 |" in report
    assert r"| a\|b | 0.40 | 0.50 |" in report


def test_of_many_temperatures_the_most_frequent_are_reported():
    """Answers from traffic may have many temperatures and are all of one kind."""
    results = {("traffic", temperature / 10): (1 + (temperature > 5)) * STEPS for temperature in range(1, 9)}
    report = write_report("toy", [], results, ROW_SECONDS, HEAD_SECONDS, POINT)
    found = [line for line in report.splitlines() if line.startswith("## Tokens")]
    assert [line.split()[5] for line in found] == ["0.6,", "0.7,", "0.8,"]


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
