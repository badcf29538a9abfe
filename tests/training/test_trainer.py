from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from outrider.errors import ConfigError, ModelError
from outrider.training.dataset import Batch
from outrider.training.plan import RunState
from outrider.training.trainer import Trainer
from tests.training.toy import HIDDEN, toy_dataset, toy_student

QUIET = {"prepare": lambda shard: None, "say": lambda line: None, "progress": lambda *_: None}


@pytest.fixture
def make(plan_of):
    """make(form) → (plan, a new Trainer on the toy's texts)."""

    def new(form="eagle3", **fields):
        plan = plan_of(form=form, learning_rate=4e-3, **fields)
        return plan, Trainer(plan, toy_student(form), toy_dataset(plan))

    return new


def train(plan, trainer, seconds):
    state = RunState.open(plan)
    with state.phase("training") as clock:
        trainer.run(clock, part=lambda _: clock.seconds / seconds, **QUIET)


def learn(trainer, num_steps):
    texts = list(trainer._dataset.training)
    for step in range(num_steps):
        trainer._learn([texts[(6 * step + place) % len(texts)] for place in range(6)], 1.0)


def means(trainer, texts):
    """Returns the mean losses and the share of hits by step."""
    batch = Batch.of(trainer._dataset, texts, trainer._device)
    with torch.no_grad():
        losses, counted, hits, _ = trainer.student.losses(batch, 3)
    return losses.sum(1) / counted.sum(1), hits.sum(1) / counted.sum(1)


@pytest.mark.parametrize("form", ["eagle3", "dspark"])
def test_a_head_learns_a_target_that_can_be_told(make, one_thread, form):
    _, trainer = make(form)
    texts = list(trainer._dataset.held_out)
    before, _ = means(trainer, texts)
    learn(trainer, 120)
    losses, hits = means(trainer, texts)
    assert losses[0] < 0.5 * before[0]
    assert losses[2] < 0.7 * before[2]  # the head also learns from its own states
    assert hits[0] > 0.5  # chance is 1 / 48
    if form == "dspark":
        assert_confident(trainer.student, trainer._dataset)


def assert_confident(student, dataset):
    """Its confidence head has learned how much is accepted."""
    tokens, features = dataset.token_ids(0).long(), dataset.features(0)
    anchors = torch.arange(4, len(tokens) - 4)
    with torch.no_grad():
        chains = student.start(features[: len(tokens) - 5], [3], [len(anchors)])
        student.step(chains, tokens[1 : len(tokens) - 4])
        right, sure = student.logits(chains)
    accepted = right.softmax(-1)[torch.arange(len(anchors)), tokens[anchors + 1]]
    assert (sure.sigmoid() - accepted).abs().mean() < 0.15
    assert sure.sigmoid().mean() > 0.6  # it begins at 0.5


def test_a_batch_has_the_rows_that_decide_the_answers(make):
    _, trainer = make()
    dataset = trainer._dataset
    texts = [dataset.training[0], dataset.training[1]]
    batch = Batch.of(dataset, texts, torch.device("cpu"))
    chain, num_context = 0, sum(batch.contexts)
    for text in texts:
        answer, hidden = dataset.text(text), dataset.hidden(text)
        for place in range(len(answer.prompt), len(answer.token_ids)):  # of the token that the chain drafts first
            torch.testing.assert_close(batch.final[chain], hidden[place - 1, -HIDDEN:])
            torch.testing.assert_close(batch.features[num_context + chain], hidden[place - 2, :-HIDDEN])
            assert batch.token_ids[num_context + chain] == answer.token_ids[place - 1]
            assert batch.answers[chain] == answer.token_ids[place]
            assert batch.num_left[chain] == len(answer.token_ids) - place
            chain += 1
    assert len(batch.answers) == chain


@pytest.mark.parametrize("form", ["eagle3", "dspark"])
def test_a_text_has_the_same_losses_alone_and_in_a_batch(make, one_thread, form):
    _, trainer = make(form)
    texts = list(trainer._dataset.training[:5])
    together = trainer._figures(texts)
    for text, figures in zip(texts, together, strict=True):
        torch.testing.assert_close(trainer._figures([text])[0], figures)


def test_losses_are_those_of_drafts_made_one_by_one(make, one_thread):
    """Each chain is drafted alone, from the true rows before it."""
    _, trainer = make()
    dataset, student, text = trainer._dataset, trainer.student, trainer._dataset.training[0]
    answer, features = dataset.text(text), dataset.features(text)
    losses, counted, *_ = student.losses(Batch.of(dataset, [text], trainer._device), 3)
    for chain in range(len(answer.response)):
        first = len(answer.prompt) - 2 + chain  # the row that begins the chain
        with torch.no_grad():
            chains = student.start(features[: first + 1], [first], [1])
            token_ids = torch.tensor(answer.token_ids[1 : first + 2])
            for step in range(3):
                place = first + 2 + step  # of the token that is drafted
                if place >= len(answer.token_ids):
                    assert not counted[step, chain]
                    break
                student.step(chains, token_ids)
                logits, _ = student.logits(chains)
                shares = torch.softmax(dataset.final(text)[place - 1] @ student.target_output.T, -1)
                expected = torch.nn.functional.cross_entropy(logits, shares[None])
                torch.testing.assert_close(losses[step, chain], expected)
                token_ids = torch.tensor(answer.token_ids[place : place + 1])


def test_several_workers_learn_what_one_does(make, one_thread, monkeypatch):
    _, alone = make()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr("outrider.training.trainer.MIN_WORKER_TOKENS", 1)
    _, trainer = make()
    assert (alone._num_workers, trainer._num_workers) == (1, 3)
    texts = list(trainer._dataset.training[:7])
    for each in (alone, trainer):
        each._learn(texts, 1.0)
    for name, weight in alone.student.weights.items():
        torch.testing.assert_close(trainer.student.weights[name].grad, weight.grad)
    torch.testing.assert_close(trainer._running, alone._running)


def test_passes_visit_each_text_once_and_parts_in_order(make, one_thread, monkeypatch):
    plan, trainer = make(passes=2, batch_tokens=30, feature_gb=40 * 20 * 96 * 4 / 1e9)
    dataset, seen, prepared = trainer._dataset, [], []
    assert len(dataset.shards) > 3
    learn_from = trainer._learn
    monkeypatch.setattr(trainer, "_learn", lambda texts, rate: (seen.extend(texts), learn_from(texts, rate)))
    with RunState.open(plan).phase("training") as clock:
        options = {**QUIET, "prepare": prepared.append}
        trainer.run(clock, part=lambda passes: passes / plan.passes, **options)
    count = len(dataset.training)
    assert sorted(seen[:count]) == sorted(seen[count:]) == list(dataset.training)
    assert seen[:count] != seen[count:]
    assert prepared == 2 * list(range(1, len(dataset.shards)))
    assert trainer.history[-1].passes == 2


def test_the_rate_is_constant_and_falls_at_the_end(make, one_thread, monkeypatch):
    plan, trainer = make(batch_tokens=30)
    rates, learn_from = {}, trainer._learn
    monkeypatch.setattr(
        trainer, "_learn", lambda texts, rate: (rates.update({trainer.step: rate}), learn_from(texts, rate))
    )
    with RunState.open(plan).phase("training") as clock:
        trainer.run(clock, part=lambda _: trainer.step / 100, **QUIET)
    assert len(rates) == 100
    assert rates[0] == 1 / 40
    assert rates[50] == rates[69] == 1
    assert rates[85] == pytest.approx(0.5)
    assert rates[99] == pytest.approx(1 / 30)
    # With more time, training goes on from the weights before the fall.
    rates.clear()
    again = Trainer(plan, toy_student("eagle3"), trainer._dataset)
    assert again.step == 100
    monkeypatch.setattr(
        again, "_learn", lambda texts, rate: (rates.update({again.step: rate}), setattr(again, "step", again.step + 1))
    )
    with RunState.open(plan).phase("training") as clock:
        again.run(clock, part=lambda _: again.step / 200, **QUIET)
    assert min(rates) == 70
    assert rates[139] == 1
    assert rates[170] == pytest.approx(0.5)


@pytest.mark.parametrize(("given", "goes_on"), [(1.05, False), (1.3, False), (3.0, True)])
def test_more_time_never_makes_a_finished_head_worse(make, one_thread, given, goes_on):
    plan, trainer = make(batch_tokens=30)
    num_steps = 0

    def run(trainer, limit):
        learn_from = trainer._learn

        def count(texts, rate):
            nonlocal num_steps
            num_steps += 1  # the time of the steps in which the rate fell is not given back
            learn_from(texts, rate)

        trainer._learn = count
        with RunState.open(plan).phase("training") as clock:
            trainer.run(clock, part=lambda _: num_steps / limit, **QUIET)

    run(trainer, 60)
    before = trainer.use_best().judged()
    for limit in (60 * given, 61 * given):  # the second one finds what the first has kept
        trainer = Trainer(plan, toy_student("eagle3"), trainer._dataset)
        run(trainer, limit)
        assert (num_steps > 60) is goes_on
        assert trainer.use_best().judged() <= before
    assert means(trainer, list(trainer._dataset.held_out))[0].isfinite().all()


def test_a_continued_run_learns_with_the_rate_that_it_is_given(make, one_thread):
    plan, trainer = make(batch_tokens=30)
    with RunState.open(plan).phase("training") as clock:
        trainer.run(clock, part=lambda _: trainer.step / 5, **QUIET)
    slower = Trainer(replace(plan, learning_rate=1e-5), toy_student("eagle3"), trainer._dataset)
    slower._learn(list(slower._dataset.training)[:6], 1.0)
    assert max(group["lr"] for group in slower._optimizer.param_groups) == 1e-5


def test_the_rate_falls_early_when_held_out_texts_no_longer_improve(make, one_thread, monkeypatch):
    plan, trainer = make(batch_tokens=30, checkpoint_seconds=0.0)
    learn_from, kept = trainer._learn, {}

    def spoil(texts, rate):
        learn_from(texts, rate if trainer.step < 20 else 0.0)
        if trainer.step > 20:
            with torch.no_grad():
                trainer.student.weights["fc.weight"].mul_(1.02)
        kept[trainer.step] = trainer.student.weights["fc.weight"].detach().clone()

    monkeypatch.setattr(trainer, "_learn", spoil)
    with RunState.open(plan).phase("training") as clock:
        trainer.run(clock, part=lambda _: trainer.step / 600, **QUIET)
    assert 100 < trainer.step < 300
    best = trainer.use_best().step
    assert best < 40
    torch.testing.assert_close(trainer.student.weights["fc.weight"], kept[best])


def test_an_interrupted_run_goes_on_with_what_it_had_learnt(make, one_thread, monkeypatch):
    plan, trainer = make(checkpoint_seconds=1e6)

    def interrupt(*_):
        if trainer.step == 5:
            raise KeyboardInterrupt

    state = RunState.open(plan)
    with pytest.raises(KeyboardInterrupt), state.phase("training") as clock:
        trainer.run(clock, part=lambda _: 0.5, **{**QUIET, "progress": interrupt})
    again = Trainer(plan, toy_student("eagle3"), trainer._dataset)
    assert again.step == 5
    assert again.history == trainer.history
    for name, weight in trainer.student.weights.items():
        torch.testing.assert_close(again.student.weights[name], weight)
    texts = list(trainer._dataset.training[:4])
    for each in (trainer, again):  # compares the optimisers' moments
        each._learn(texts, 0.5)
    torch.testing.assert_close(again.student.weights["fc.weight"], trainer.student.weights["fc.weight"])


def test_a_run_of_another_version_is_refused(make, one_thread):
    plan, trainer = make()
    trainer.checkpoint.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"student": {}, "step": 3}, trainer.checkpoint)
    with pytest.raises(ConfigError, match="with other weights: give another --out"):
        Trainer(plan, trainer.student, trainer._dataset)


def test_a_checkpoint_that_was_being_written_leaves_the_old_one(make, one_thread, monkeypatch):
    plan, trainer = make()
    clock = RunState.open(plan).phase("training")
    with clock as now:
        trainer.save(now, trainer.checkpoint)
        trainer.step = 9

        write = Path.write_bytes

        def fill(path, content):
            write(path, content[:99])
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Path, "write_bytes", fill)
        with pytest.raises(OSError, match="No space left"):
            trainer.save(now, trainer.checkpoint)
        monkeypatch.undo()
    assert Trainer(plan, toy_student("eagle3"), trainer._dataset).step == 0


def test_a_loss_that_is_no_number_leaves_the_checkpoint_as_it_was(make, one_thread, monkeypatch):
    plan, trainer = make()
    learn(trainer, 3)
    with RunState.open(plan).phase("training") as clock:
        trainer.save(clock, trainer.checkpoint)
    before = torch.load(trainer.checkpoint)["weights"]
    losses = trainer.student.losses

    def spoilt(batch, num_steps):
        found, *others = losses(batch, num_steps)
        return found * torch.nan, *others

    monkeypatch.setattr(trainer.student, "losses", spoilt)
    with pytest.raises(ModelError, match="--rate"):
        train(plan, trainer, 60)
    after = torch.load(trainer.checkpoint)["weights"]
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_time_given_ends_the_training(make, one_thread):
    plan, trainer = make()
    started = time.monotonic()
    train(plan, trainer, 0.5)
    assert time.monotonic() - started >= 0.5
    assert trainer.step > 0
    assert trainer.history[-1].step == trainer.step
