"""Whole runs on the tiny model, which are started, interrupted, killed and continued."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest
import torch

from outrider.errors import ConfigError
from outrider.heads.checkpoint import Target
from outrider.heads.open import open_head
from outrider.training.answer_files import read_answers
from outrider.training.dataset import Dataset, features_folder
from outrider.training.generate import answers_folder
from outrider.training.new_heads import new_head
from outrider.training.plan import RunState
from outrider.training.run import train_head
from outrider.training.student import Student

pytestmark = pytest.mark.usefixtures("light_training")

WAIT_SECONDS = 120.0


def run(plan, *, address=None, progress=lambda *_: None):
    """Returns (the report, the lines given to `say`)."""

    @contextlib.contextmanager
    def serve():
        assert address is not None, "a cluster was started"
        yield address

    said = []
    return train_head(plan, serve, say=said.append, progress=progress), "\n".join(said)


@pytest.mark.full
def test_a_head_with_more_steps_than_are_priced_is_reported(plan_of):
    report, _ = run(plan_of(form="dspark", num_steps=7, minutes=0.05))
    assert "| k = 5 |" in report


@pytest.mark.parametrize("form", ["eagle3", "dspark"])
def test_a_head_from_kept_answers(plan_of, tiny_model, form):
    plan = plan_of(form=form, minutes=0.03)
    report, first = run(plan)
    head = open_head(plan.out, Target.open(tiny_model), torch.device("cpu"), torch.float32)
    assert head.spec.form == form
    assert report == (plan.out / "report.md").read_text()
    assert "Tokens per step, greedy" in report
    assert "temperature 1, coupled" in report
    assert "| lookup, then head |" in report
    ET.parse(plan.out / "training.svg")
    assert (plan.out / "training.txt").read_text() == f"{first}\n"
    again, said = run(plan)  # nothing is left to do
    assert "training done" not in said
    assert "continuing the run" in said
    assert again.splitlines()[:5] == report.splitlines()[:5]


def test_a_run_of_an_older_version_is_refused(plan_of):
    plan = plan_of(minutes=0.05)
    plan.work.mkdir(parents=True)
    with RunState.open(plan).phase("features"):
        pass
    with pytest.raises(ConfigError, match="older version: give another --out"):
        run(plan)


def test_hidden_states_that_do_not_fit_on_the_disk_are_computed_when_they_are_needed(plan_of):
    whole = plan_of(passes=2, minutes=0.05)
    run(whole)
    features = features_folder(whole)
    sizes = [path.stat().st_size for path in features.glob("*.bin")]
    assert len(sizes) == 2  # held-out and other texts
    bound = 0.6 * sum(sizes)
    plan = plan_of(passes=2, minutes=0.05, feature_gb=bound / 1e9, out=whole.out.with_name("part"))
    seen = []

    def watch(stage, *_):
        seen.append(sum(path.stat().st_size for path in features_folder(plan).glob("*.bin")))

    report, said = run(plan, progress=watch)
    assert max(seen) <= bound
    assert "will be computed in each pass" in said
    assert "2.00 passes" in report
    first, second = Dataset(features), Dataset(features_folder(plan))
    last = len(second) - 1
    assert len(first) == len(second)
    torch.testing.assert_close(second.hidden(last), first.hidden(last))


@pytest.mark.full
def test_a_run_that_has_ended_learns_on_when_it_is_given_more_time(plan_of):
    def num_steps(report):
        return int(re.search(r"(\d+) training steps", report)[1])

    first, _ = run(plan_of(minutes=0.03))
    again, said = run(plan_of(minutes=0.08))
    assert num_steps(again) > num_steps(first)
    assert "features of" not in said


def test_hidden_states_are_those_of_the_target(plan_of, tiny_model):
    """The hidden states are compared with those that transformers computes."""
    from transformers import AutoModelForCausalLM

    plan = plan_of(minutes=0.05)
    run(plan)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    dataset = Dataset(features_folder(plan))
    for text in (0, len(dataset) - 1):
        with torch.inference_mode():
            states = model(dataset.token_ids(text)[None], output_hidden_states=True).hidden_states
        # states[i] is the input of layer i; the last one is the output of the final norm.
        taps = json.loads((plan.out / "config.json").read_text())["eagle_aux_hidden_state_layer_ids"]
        expected = torch.cat([*(states[tap][0] for tap in taps), states[-1][0]], -1)
        torch.testing.assert_close(dataset.hidden(text), expected, atol=1e-4, rtol=1e-4)


def test_the_target_writes_its_own_prompts(plan_of, running):
    plan = plan_of(traffic=None, minutes=0.05, concurrency=4, max_answer_tokens=16)
    stages = set()
    _, said = run(plan, address=running.router_address, progress=lambda stage, *_: stages.add(stage))
    assert stages == {
        "answers, seconds",
        "features, thousand tokens",
        "training, percent",
    }  # so a log has one line per stage
    answers = list(read_answers(answers_folder(plan)))
    assert len(answers) >= 4
    assert {answer.temperature for answer in answers} <= {0.0, 0.7, 1.0}
    assert all(8 <= len(answer.response) <= 16 for answer in answers)
    assert "writes prompts" in said
    running.wait_until_nothing_is_held()


def test_answers_are_written_until_there_are_enough_tokens(plan_of, running, monkeypatch):
    monkeypatch.setattr("outrider.training.generate.SAY_SECONDS", 0.0)
    plan = plan_of(traffic=None, minutes=0.01, answer_tokens=1500, concurrency=4, max_answer_tokens=16)
    _, said = run(plan, address=running.router_address)
    answers = list(read_answers(answers_folder(plan)))
    assert sum(len(answer.response) for answer in answers) >= 1500
    by_prompt = {}
    for answer in answers:
        by_prompt.setdefault(tuple(answer.prompt), []).append(answer.temperature)
    assert [0.0, 0.7] in by_prompt.values()
    assert [0.0, 1.0] in by_prompt.values()
    assert re.search(r"answers: \d+ tokens, \d+ tokens/s, \d+ minutes left", said)
    running.wait_until_nothing_is_held()


@pytest.mark.full
def test_prompts_of_a_file_are_answered_once_over_runs(plan_of, running, tmp_path):
    lines = [json.dumps({"text": f"question {number}", "kind": "ab"[number % 2]}) for number in range(12)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines[:5]))
    plan = plan_of(traffic=None, prompts=tmp_path / "prompts.jsonl", minutes=0.1, concurrency=3, max_answer_tokens=12)

    def interrupt(stage, *_):
        if stage.startswith("features"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(plan, address=running.router_address, progress=interrupt)
    before = list(read_answers(answers_folder(plan)))
    assert len(before) == 5
    state = RunState.open(plan)
    state.done.remove("answers")  # as if the run had been interrupted in this stage
    state.write()
    (plan.work / "features" / "texts.npz").unlink()
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    run(plan, address=running.router_address)
    answers = list(read_answers(answers_folder(plan)))
    assert answers[:5] == before
    assert len({tuple(answer.prompt) for answer in answers}) == len(answers) == 12
    assert {answer.kind for answer in answers} == {"a", "b"}


KILLED = """
import os, signal, sys
from pathlib import Path
from outrider.model_hub.config import ModelConfig
from outrider.training.plan import TrainingPlan
from outrider.training.run import train_head

model, kept, out, stage, count, minutes = sys.argv[1:]
seen = 0

def progress(name, *_):
    global seen
    seen += name.startswith(stage)
    if stage and seen >= int(count):
        os.kill(os.getpid(), signal.SIGKILL)

plan = TrainingPlan(
    out=Path(out), traffic=Path(kept), minutes=float(minutes), draft_vocab_size=100, num_steps=2,
    checkpoint_seconds=0.0,
    model=ModelConfig(id=model, num_threads=1, dtype="float32"),
)
train_head(plan, None, say=print, progress=progress)
"""


@pytest.mark.full  # starts three processes that import torch; the previous test interrupts a run in this process
def test_a_run_that_is_killed_goes_on_where_it_was(tiny_model, kept, tmp_path):
    def start(*arguments):
        return subprocess.run(
            [sys.executable, "-c", KILLED, *map(str, (tiny_model, kept, tmp_path / "head", *arguments))],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=False, capture_output=True, text=True, timeout=WAIT_SECONDS,
        )  # fmt: skip

    hidden = tmp_path / "head" / "work" / "features" / "hidden-1.bin"
    assert start("features", 2, 10).returncode == -signal.SIGKILL  # within the phase
    num_bytes = hidden.stat().st_size
    assert num_bytes > 0
    killed = start("training", 3, 10)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert "continuing the run" in killed.stdout
    whole = hidden.stat()
    assert whole.st_size > num_bytes
    ended = start("", 0, 0.1)
    assert ended.returncode == 0, ended.stderr
    assert "done: features" in ended.stdout
    assert "step 0:" not in ended.stdout  # it continued from the weights of the killed run
    assert hidden.stat().st_mtime_ns == whole.st_mtime_ns
    assert (tmp_path / "head" / "report.md").is_file()


def test_a_head_is_taken_up_with_its_reduction(plan_of, tiny_model, tmp_path):
    target, cpu = Target.open(tiny_model), torch.device("cpu")
    first = plan_of(minutes=0.03)
    run(first)
    second = plan_of(minutes=0.03, out=tmp_path / "second", init_from=first.out, draft_vocab_size=7)
    run(second)
    old, new = (open_head(plan.out, target, cpu, torch.float32) for plan in (first, second))
    assert new.reduction.fingerprint == old.reduction.fingerprint  # a running cluster's features fit the new head, too
    assert new.target_ids.tolist() == old.target_ids.tolist()
    assert new.spec.fingerprint != old.spec.fingerprint


def test_a_head_that_cannot_be_taken_up_is_refused_before_anything_starts(plan_of, tiny_model, tmp_path):
    first = plan_of(minutes=0.03)
    run(first)
    config = json.loads((first.out / "config.json").read_text())
    second = plan_of(out=tmp_path / "second", traffic=None, init_from=first.out)
    target, cpu = Target.open(tiny_model), torch.device("cpu")
    for change, said in (
        ({"target_hidden_size": 96}, "hidden_size 96 of the head"),
        ({"speculators_model_type": "eagle9"}, "an unknown form"),
        ({"eagle_aux_hidden_state_layer_ids": [1, target.num_layers]}, "before the final norm"),
    ):
        (first.out / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ConfigError, match=said):
            run(second)
        assert not second.out.exists()
    checkpoint = new_head(plan_of(form="dspark"), target, "tiny", torch.arange(target.vocab_size), cpu)
    Student(checkpoint, target, cpu, torch.float32).export(first.out)
    with pytest.raises(ConfigError, match="is not an eagle3 head: its form is dspark"):
        run(second)
    assert not second.out.exists()
