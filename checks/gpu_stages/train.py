"""`outrider train-head` for a model with random weights: it must run to its report, and how fast it learns is recorded.

The head itself is worth nothing, as its target says nothing.
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
    """A model of random weights would write longer ones than are learnt from."""
    rng = random.Random(1)  # noqa: S311 no secret
    return ("".join(rng.choices("abcdefghij ", k=rng.randint(20, 80))) for _ in range(number))


def run(day: Day) -> None:
    model = day.random_model("0.5b" if day.is_gpu else "tiny")
    out = day.scratch / "head"
    shutil.rmtree(out, ignore_errors=True)
    day.logs.mkdir(parents=True, exist_ok=True)
    minutes, num_prompts = (0.6, 2000) if day.is_gpu else (0.12, 24)
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
    status = subprocess.run(command, check=False).returncode
    state = json.loads((out / "work" / "state.json").read_text(encoding="utf-8"))
    report = (out / "report.md").read_text(encoding="utf-8") if (out / "report.md").exists() else ""
    said = (out / "training.txt").read_text(encoding="utf-8")
    steps = re.search(r"(\d+) training steps", report)
    texts = re.search(r"features of (\d+) texts, (\d+) tokens", said)
    seconds = state["seconds"].get("training", 0.0)
    day.tell(
        "train",
        exit_status=status,
        phases={name: round(each, 1) for name, each in state["seconds"].items()},
        texts=int(texts[1]) if texts else 0,
        tokens=int(texts[2]) if texts else 0,
        steps=int(steps[1]) if steps else 0,
        samples_per_second=round(int(steps[1]) * BATCH_SIZE / seconds, 1) if steps and seconds else 0.0,
    )
    day.expect(f"train-head ends with a report, not with status {status}", status == 0 and steps is not None)
