"""Runs `outrider train-head` for a model with random weights up to its report, and records the training speed.

The head itself is useless, because its target's output is random.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator

from checks.gpu_stages.day import WINDOW, Day

BATCH_SIZE = 6


def _texts(number: int) -> Iterator[str]:
    """Yields random texts, since a model with random weights would write longer ones than training uses."""
    rng = random.Random(1)  # noqa: S311 no secret
    return ("".join(rng.choices("abcdefghij ", k=rng.randint(20, 80))) for _ in range(number))


def run(day: Day) -> None:
    model = day.random_model("0.5b" if day.is_gpu else "tiny")
    out = day.scratch / "head"
    shutil.rmtree(out, ignore_errors=True)
    day.logs.mkdir(parents=True, exist_ok=True)
    minutes, num_prompts = (0.5, 2000) if day.is_gpu else (0.12, 24)
    prompts = day.scratch / "prompts.jsonl"
    prompts.write_text("".join(f'{{"text": "{text}"}}\n' for text in _texts(num_prompts)), encoding="utf-8")
    command = [sys.executable, "-m", "outrider.cli.main", "train-head", "--out", str(out), "--model", str(model)]
    command += ["--minutes", str(minutes), "--batch", str(BATCH_SIZE), "--draft", "none", "--log-dir", str(day.logs)]
    command += ["--prompts", str(prompts)]
    settings = [f"model.device={day.device}", f"model.max_model_len={WINDOW}"]
    if not day.is_gpu:
        settings += ["kv_cache.memory=256MiB"]
        command += ["--draft-vocab", "256"]
    for setting in settings:
        command += ["--set", setting]
    num_steps = 0
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as training:
        assert training.stdout is not None
        for line in training.stdout:
            print(line, end="", flush=True)
            if (found := texts_of(line)) is not None:
                day.tell("features", texts=found[0], tokens=found[1])
            if (learnt := steps_of(line)) is not None and learnt[1] > num_steps:
                seconds, num_steps = learnt
                rate = round(num_steps * BATCH_SIZE / max(seconds, 1), 1)
                day.tell("training", seconds=seconds, steps=num_steps, samples_per_second=rate)
        status = training.wait()
    day.expect(f"train-head ends with status {status}", status == 0)
    day.expect("train-head writes a report", (out / "report.md").exists())
    day.expect("a head is trained", num_steps > 0)
    phases = json.loads((out / "work" / "state.json").read_text(encoding="utf-8"))["seconds"]
    day.tell("train", exit_status=status, phases={name: round(each, 1) for name, each in phases.items()})


def texts_of(line: str) -> tuple[int, int] | None:
    """Returns the numbers of (texts, tokens) whose features are computed, if this line of train-head reports them."""
    found = re.search(r"features of (\d+) texts, (\d+) tokens", line)
    return None if found is None else (int(found[1]), int(found[2]))


def steps_of(line: str) -> tuple[int, int] | None:
    """Returns (seconds, steps) of training so far, if this line of train-head reports them."""
    found = re.search(r"training (\d+) s, step (\d+)", line)
    return None if found is None else (int(found[1]), int(found[2]))
