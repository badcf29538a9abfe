"""READ FIRST: one run of `outrider train-head`, phase by phase. Each phase continues where the last run stopped.

1. answers: the target writes prompts and answers them in a cluster of its own (`generate`), unless answers are given;
2. features: the target's hidden states at every token are computed, and a step is timed on this machine
   (`hidden_states`);
3. training: a `trainer` trains a `student`;
4. report: the head is exported, drafting is replayed on held-out answers (`replay`), and the `report` is written.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from outrider.engine.processor import usable_cpus, within_quota
from outrider.errors import ConfigError
from outrider.heads.checkpoint import Target
from outrider.model_hub.kernels import resolve_device
from outrider.model_hub.locate import locate_model
from outrider.training.answer_files import read_answers
from outrider.training.dataset import Dataset, choose_texts, features_folder
from outrider.training.generate import answers_folder, write_answers
from outrider.training.hidden_states import MAX_DRAFT_TOKENS, measure_rows, open_target, write_hidden_states
from outrider.training.make_student import make_student, needed_taps
from outrider.training.plan import (
    ANSWERS,
    ANSWERS_SHARE,
    FEATURES,
    FEATURES_SHARE,
    REPORT_SHARE,
    TRAINING,
    PhaseClock,
    Progress,
    RunState,
    Say,
    TrainingPlan,
    only_run,
    write_atomically,
)
from outrider.training.plot import draw
from outrider.training.prompts import read_prompts
from outrider.training.replay import replay
from outrider.training.report import measure_head, write_report
from outrider.training.trainer import Trainer

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
            say_and_keep(f"answers: the target {own}answers for {seconds:.0f} s")
            # The later phases run without the cluster, which would make torch three to four times as slow.
            with serve() as address, state.phase(ANSWERS) as clock:
                write_answers(plan, address, clock, seconds=seconds, progress=progress)
        if FEATURES not in state.done:
            with state.phase(FEATURES) as clock:
                state.row_seconds = _write_hidden_states(plan, target, taps, clock, say_and_keep, progress)
            gc.collect()
        return _train(plan, state, target, location.name, say_and_keep, progress)


def _write_hidden_states(
    plan: TrainingPlan, target: Target, taps: tuple[int, ...], clock: PhaseClock, say: Say, progress: Progress
) -> list[list[float]]:
    """Writes the hidden states. Returns the cost of a step on this machine, i.e. the result of `measure_rows`."""
    every = (*taps, target.num_layers)
    compute = open_target(plan.model, every, target.hidden_size, max_length=plan.max_length)
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
    say(f"features of {len(dataset.texts)} texts, {len(dataset.tokens)} tokens")
    with compute.ranks:
        write_hidden_states(compute, dataset, clock, seconds=FEATURES_SHARE * plan.seconds, progress=progress)
        if len(dataset) < len(dataset.texts):
            say(f"the time for features ended after {len(dataset)} texts")
        return measure_rows(compute, limit_seconds=plan.measure_seconds)


def _train(plan: TrainingPlan, state: RunState, target: Target, name: str, say: Say, progress: Progress) -> str:
    """Trains and exports the head; returns the report."""
    device = resolve_device(plan.model.device)
    torch.set_num_threads(len(within_quota(usable_cpus())))  # loading a model may have limited torch to one thread
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
    spent = sum(seconds for phase, seconds in state.seconds.items() if phase != TRAINING)
    seconds = max(plan.seconds * (1 - REPORT_SHARE) - spent, 0.1 * plan.seconds)
    if state.seconds.get(TRAINING, 0.0) < seconds:
        say("training: " + "; ".join(lines))
        with state.phase(TRAINING) as clock:
            trainer.run(clock, seconds=seconds, say=say, progress=progress)
    student.export(plan.out)
    write_atomically(plan.out / "training.svg", draw(trainer.history, plan.out.resolve().name))
    say(f"the head is in {plan.out}; replaying its drafts on held-out answers")
    max_k = MAX_DRAFT_TOKENS if plan.form == "eagle3" else min(plan.num_steps, MAX_DRAFT_TOKENS)
    results = replay(student, target, dataset, dataset.held_out, max_k=max_k)
    lines.append("seconds: " + ", ".join(f"{phase} {seconds:.0f}" for phase, seconds in state.seconds.items()))
    lines.append(f"{trainer.step} training steps; the curve is in training.svg")
    report = write_report(
        f"{plan.out.resolve().name}: a drafter head for {name}",
        lines,
        results,
        state.row_seconds,
        measure_head(plan.out, plan.model, limit_seconds=plan.measure_seconds),
        num_at_once=plan.num_steps if plan.form == "dspark" else 1,
    )
    write_atomically(plan.out / "report.md", report)
    return report
