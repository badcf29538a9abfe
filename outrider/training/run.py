"""READ FIRST: one run of `outrider train-head`, phase by phase. Each phase continues where the last run stopped.

1. answers: the target writes prompts and answers them in a cluster of its own (`generate`), unless answers are given;
2. features: the target's hidden states at every token are computed, and a step is timed on this machine
   (`hidden_states`);
3. training: a `trainer` trains a `student`;
4. report: the head is exported, drafting is replayed on held-out answers (`replay`), and the `report` is written.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from outrider.engine.processor import usable_cpus, within_quota
from outrider.errors import ConfigError
from outrider.heads.checkpoint import Target
from outrider.model_hub.kernels import resolve_device
from outrider.model_hub.locate import locate_model
from outrider.training.answer_files import read_answers
from outrider.training.dataset import TEXTS, Dataset, choose_texts, features_folder
from outrider.training.generate import AnswerPhase, answers_folder
from outrider.training.hidden_states import MAX_DRAFT_TOKENS, measure_rows, opened_target, write_hidden_states
from outrider.training.new_heads import make_student, needed_taps
from outrider.training.plan import PhaseClock, Progress, RunState, Say, TrainingPlan, only_run, write_atomically
from outrider.training.plot import draw
from outrider.training.prompts import read_prompts
from outrider.training.replay import replay
from outrider.training.report import measure_head, write_report
from outrider.training.trainer import Trainer

ANSWERS, FEATURES, TRAINING = "answers", "features", "training"

ANSWERS_SHARE, FEATURES_SHARE, REPORT_SHARE = 0.25, 0.15, 0.05
"""Maximum fractions of a run's time by phase; training takes the rest. Two cores write as many answers in a quarter of
an hour as they can learn from in half an hour."""

MIN_HELD_OUT = 20
"""Number of held-out texts below which the report's figures differ more between runs than between heads."""

Serve = Callable[[], AbstractContextManager[str]]
"""Returns a context manager that runs a cluster of the target during a `with` block and yields the router's address."""


def train_head(plan: TrainingPlan, serve: Serve, *, say: Say, progress: Progress) -> str:
    """Makes the head in `plan.out` and returns the report. The lines given to `say` are also written to training.txt.

    Raises: OutriderError; KeyboardInterrupt, after which the next run continues this one.
    """
    location = locate_model(plan.model, progress=progress)
    target = Target.open(location.directory)
    taps = needed_taps(plan, target)
    if plan.prompts is not None:
        read_prompts(plan.prompts)  # raises for a bad line before anything is started
    if plan.traffic is not None and next(read_answers(plan.traffic), None) is None:
        raise ConfigError(
            f"--from-traffic {plan.traffic} has no kept answers: let a decode node run with "
            f"decode_node.keep_answers={plan.traffic}"
        )

    def say_and_keep(line: str) -> None:
        say(line)
        with (plan.out / "training.txt").open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    with only_run(plan):
        state = RunState.open(plan)
        if state.seconds:
            spent = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in state.seconds.items())
            done = f"; done: {', '.join(state.done)}" if state.done else ""
            say_and_keep(f"continuing the run in {plan.out}: {spent}{done}")
        if plan.traffic is None and ANSWERS not in state.done:
            seconds = ANSWERS_SHARE * plan.seconds
            own = "writes prompts and " if plan.prompts is None else ""
            amount = f"{plan.answer_tokens} tokens" if plan.answer_tokens else f"for {seconds:.0f} s"
            say_and_keep(f"answers: the target {own}answers {amount}")
            # The later phases run without the cluster, which would make torch three to four times as slow.
            with serve() as address, state.phase(ANSWERS) as clock:
                asyncio.run(AnswerPhase(plan, clock, seconds, say_and_keep, progress).run(address))
        if FEATURES not in state.done:
            with state.phase(FEATURES) as clock:
                state.row_seconds = _begin_features(plan, target, taps, clock, say_and_keep, progress)
        elif not (features_folder(plan) / TEXTS).is_file():
            raise ConfigError(f"{plan.out} holds a run of an older version: give another --out")
        torch.set_num_threads(len(within_quota(usable_cpus())))
        return _train(plan, state, target, taps, location.name, say_and_keep, progress)


def _begin_features(
    plan: TrainingPlan, target: Target, taps: tuple[int, ...], clock: PhaseClock, say: Say, progress: Progress
) -> list[list[float]]:
    """Chooses the texts and writes the hidden states that fit on the disk; training computes the others when it needs
    them. If the plan limits the time, texts whose hidden states are not reached are left out.

    Returns the cost of a step on this machine, i.e. the result of `measure_rows`.
    """
    with opened_target(plan, target, taps) as compute:
        try:
            dataset = Dataset(features_folder(plan))
        except FileNotFoundError:
            dataset = choose_texts(
                plan,
                read_answers(plan.traffic or answers_folder(plan)),
                vocab_size=target.vocab_size,
                hidden_size=target.hidden_size,
                num_taps=len(taps),
                dtype=compute.model.spec.dtype,
            )
        say(f"features of {len(dataset)} texts, {len(dataset.tokens)} tokens, in {len(dataset.shards)} parts")
        seconds = math.inf if plan.passes else FEATURES_SHARE * plan.seconds
        for shard, texts in enumerate(dataset.shards):
            if shard and not dataset.fits(shard, plan.feature_bytes):
                say(f"{len(dataset) - texts.start} texts will be computed in each pass: the disk has no room for more")
                break
            write_hidden_states(compute, dataset, shard, clock, seconds=seconds, progress=progress)
            if not dataset.is_done(shard):
                first = texts.start + dataset.num_done(shard)
                say(f"the time for features ended after {first} texts")
                dataset.leave_out(first)
                break
        return measure_rows(compute, limit_seconds=plan.measure_seconds)


def _train(
    plan: TrainingPlan,
    state: RunState,
    target: Target,
    taps: tuple[int, ...],
    name: str,
    say: Say,
    progress: Progress,
) -> str:
    """Trains and exports the head; returns the report."""
    device = resolve_device(plan.model.device)
    dataset = Dataset(features_folder(plan))
    student = make_student(plan, target, dataset, torch.device(device), name=name)
    counts = dataset.answer_counts(target.vocab_size)
    covered = counts[student.target_ids.cpu()].sum().item() / max(int(counts.sum()), 1)
    num_parameters = sum(weight.numel() for weight in student.weights.values())
    lines = [
        f"target {name}, form {plan.form}, {num_parameters / 1e6:.1f} M trained weights",
        (
            f"{len(dataset.training)} texts for training and {len(dataset.held_out)} held out; "
            f"{int(counts.sum())} answer tokens, of which {100 * covered:.1f} % are in the draft vocabulary of "
            f"{len(student.target_ids)}"
        ),
    ]
    if len(dataset.held_out) < MIN_HELD_OUT:
        lines.append(
            f"{len(dataset.held_out)} held-out texts are too few for good figures: give more --minutes or more prompts"
        )
    trainer = Trainer(plan, student, dataset)
    say("training: " + "; ".join(lines))
    with state.phase(TRAINING) as clock:

        def part(passes: float) -> float:
            if plan.passes:
                return passes / plan.passes
            spent = sum(seconds for phase, seconds in state.seconds.items() if phase != TRAINING)
            return clock.seconds / max(plan.seconds * (1 - REPORT_SHARE) - spent, 0.1 * plan.seconds)

        def prepare(shard: int) -> None:
            if not dataset.is_done(shard):
                with clock.paused(), state.phase(FEATURES) as pause, opened_target(plan, target, taps) as compute:
                    dataset.make_room(shard, plan.feature_bytes)
                    write_hidden_states(compute, dataset, shard, pause, seconds=math.inf, progress=progress)

        trainer.run(clock, part=part, prepare=prepare, say=say, progress=progress)
    best = trainer.use_best()
    student.export(plan.out)
    write_atomically(plan.out / "training.svg", draw(trainer.history, plan.out.resolve().name))
    say(f"the head is in {plan.out}; replaying its drafts on held-out answers")
    max_k = MAX_DRAFT_TOKENS if plan.form == "eagle3" else min(plan.num_steps, MAX_DRAFT_TOKENS)
    results = replay(student, target, dataset, dataset.held_out, max_k=max_k)
    lines.append("seconds: " + ", ".join(f"{phase} {seconds:.0f}" for phase, seconds in state.seconds.items()))
    lines.append(
        f"{trainer.step} training steps, {trainer.history[-1].passes:.2f} passes; the weights are those of step "
        f"{best.step}; the curve is in training.svg"
    )
    report = write_report(
        f"{plan.out.resolve().name}: a drafter head for {name}",
        lines,
        results,
        state.row_seconds,
        measure_head(plan.out, plan.model, limit_seconds=plan.measure_seconds),
        best,
        num_at_once=plan.num_steps if plan.form == "dspark" else 1,
    )
    write_atomically(plan.out / "report.md", report)
    return report
