from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from outrider.errors import ConfigError, ModelError
from outrider.training.dataset import Batch
from outrider.training.plan import WITH_TAPS, RunState
from outrider.training.trainer import Trainer
from tests.training.toy import HIDDEN, toy_dataset, toy_student


@pytest.fixture
def make(plan_of):
    """make(form) → (plan, a new Trainer on the toy's texts)."""

    def new(form="eagle3", **fields):
        plan = plan_of(form=form, learning_rate=4e-3, **fields)
        dataset = toy_dataset(plan, has_taps=form in WITH_TAPS)
        return plan, Trainer(plan, toy_student(form), dataset)

    return new


def train(plan, trainer, seconds):
    state = RunState.open(plan)
    with state.phase("training") as clock:
        trainer.run(clock, seconds=seconds, say=lambda _: None, progress=lambda *_: None)


def learn(trainer, num_steps):
    batches = trainer._batches()
    for _ in range(num_steps):
        trainer._learn(Batch.of(trainer._dataset, next(batches), trainer._device), 0.1)


@pytest.mark.parametrize("form", ["eagle3", "dspark", "medusa", "mlp"])
def test_a_head_learns_a_target_that_can_be_told(make, one_thread, form):
    _, trainer = make(form)
    batch = Batch.of(trainer._dataset, list(trainer._dataset.held_out), trainer._device)
    before = [loss.item() for loss in trainer.student.losses(batch, 3)[0]]
    learn(trainer, 120)
    losses, hits, _ = trainer.student.losses(batch, 3)
    assert losses[0].item() < 0.5 * before[0]
    assert losses[2].item() < 0.7 * before[2]  # the head also learns from its own states
    assert hits[0].float().mean() > 0.5  # chance is 1 / 48
    if form == "dspark":
        assert_confident(trainer.student, trainer._dataset)


def assert_confident(student, dataset):
    """Its confidence head has learned how much is accepted."""
    rows = dataset.rows(dataset.held_out[0])
    tokens, features = dataset.tokens[rows], dataset.features[rows]
    anchors = torch.arange(4, len(tokens) - 4)
    with torch.no_grad():
        hidden, logits = student._blocks(features[: len(tokens) - 4], tokens, anchors)
        right, sure = student._head.logits_after(logits[:, 0], hidden[:, :1], tokens[anchors, None])
    accepted = right.softmax(-1)[torch.arange(len(anchors)), tokens[anchors + 1]]
    assert (sure.sigmoid() - accepted).abs().mean() < 0.15
    assert sure.sigmoid().mean() > 0.6  # it begins at 0.5


def test_a_batch_has_the_rows_that_decide_the_answers(make):
    _, trainer = make()
    dataset = trainer._dataset
    texts = [dataset.training[0], dataset.training[1]]
    batch = Batch.of(dataset, texts, torch.device("cpu"))
    for text, place, depth, final in zip(
        batch.texts.tolist(), batch.places.tolist(), batch.depths.tolist(), batch.final, strict=True
    ):
        number = texts[text]
        assert depth == place - len(dataset.texts[number].prompt) + 1
        own = dataset.hidden[dataset.rows(number).start + place]
        torch.testing.assert_close(final, own[-HIDDEN:])
        torch.testing.assert_close(batch.features[text, place], own[:-HIDDEN])
    assert len(batch.depths) == sum(len(dataset.texts[text].response) for text in texts)


def test_an_interrupted_run_goes_on_with_what_it_had_learnt(make, one_thread, monkeypatch):
    plan, trainer = make(checkpoint_seconds=1e6)

    def interrupt(*_):
        if trainer.step == 5:
            raise KeyboardInterrupt

    state = RunState.open(plan)
    with pytest.raises(KeyboardInterrupt), state.phase("training") as clock:
        trainer.run(clock, seconds=1e6, say=lambda _: None, progress=interrupt)
    again = Trainer(plan, toy_student("eagle3"), trainer._dataset)
    assert again.step == 5
    assert again.history == trainer.history
    for name, weight in trainer.student.weights.items():
        torch.testing.assert_close(again.student.weights[name], weight)
    texts = list(trainer._dataset.training[:4])
    for each in (trainer, again):  # compares the optimisers' moments
        each._learn(Batch.of(each._dataset, texts, each._device), 0.5)
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
        trainer.save(now)
        trainer.step = 9

        write = Path.write_bytes

        def fill(path, content):
            write(path, content[:99])
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Path, "write_bytes", fill)
        with pytest.raises(OSError, match="No space left"):
            trainer.save(now)
        monkeypatch.undo()
    assert Trainer(plan, toy_student("eagle3"), trainer._dataset).step == 0


def test_a_loss_that_is_no_number_leaves_the_checkpoint_as_it_was(make, one_thread, monkeypatch):
    plan, trainer = make()
    train(plan, trainer, 0.01)
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
