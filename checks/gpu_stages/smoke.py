"""Runs the whole path with a small model, in deterministic mode and without it: load, checks, capture, forward, sample.

In deterministic mode, a row has the same bits in any batch, with CUDA graphs and without them. So answers are compared
across batch sizes, each time with different sequences in the batch and with prompts cut into different chunks.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from checks.gpu_stages.day import Day
from checks.gpu_stages.engine import OpenEngine, open_engine, tables
from outrider.engine.input_batch import SequenceRows
from outrider.engine.sampler import Sampler, SampleRows
from outrider.request import SamplingParams

NUM_ANSWERS = 200
ANSWER_TOKENS = 12
BATCH_SIZES = (1, 3, 16, 64)
MAX_PROMPT_TOKENS = 40
MAX_BLOCKS = 4
"""Maximum number of KV blocks of one answer with its prompt."""
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_p": 0.95},
    {"temperature": 1.0, "top_k": 50},
)


def run(day: Day) -> None:
    path = day.random_model("0.5b" if day.is_gpu else "tiny")
    for deterministic in (True, False):
        with day.part(f"deterministic {deterministic}"):
            _run(day, path, deterministic=deterministic)


def _run(day: Day, path: Path, *, deterministic: bool) -> None:
    started = time.monotonic()
    num_blocks = BATCH_SIZES[-1] * MAX_BLOCKS
    graphed = open_engine(day, path, deterministic=deterministic, num_blocks=num_blocks)
    plain = open_engine(
        day, path, deterministic=deterministic, num_blocks=num_blocks, graphs=None, loaded=graphed.loaded
    )
    numerics = graphed.loaded.info.numerics
    day.tell(
        "open",
        deterministic=deterministic,
        seconds=round(time.monotonic() - started, 1),
        numerics=numerics,
        attention=graphed.runner.attention_name,
    )
    num_equal, worst, num_all = _compare(graphed, plain)
    day.tell(
        "graphs",
        deterministic=deterministic,
        equal=num_equal,
        of=num_all,
        worst=worst,
        step_ms={num_seqs: round(1e3 * _step_seconds(day, graphed, num_seqs), 3) for num_seqs in (1, 32)},
    )
    if deterministic:
        day.expect(f"numerics are exact, not {numerics}", numerics.startswith("exact"))
        day.expect("logits of graphs are those without, bit for bit", num_equal == num_all)
        _compare_answers(day, graphed)
    else:
        day.expect("logits of graphs are close to those without", worst < 0.5)


def _compare(graphed: OpenEngine, plain: OpenEngine) -> tuple[int, float, int]:
    """Compares logits in four kinds of steps. Returns (number of equal steps, largest difference, number of steps)."""
    import torch

    num_equal, worst, num_all = 0, 0.0, 0
    for num_seqs in (1, 3, 8, 30):
        places = list(tables(num_seqs, 16 * MAX_BLOCKS, 16))
        for lengths in (  # prompts, decoding, verification, and both decoding and a prompt's chunk
            [9] * num_seqs,
            [1] * num_seqs,
            [5] * num_seqs,
            [1 + 8 * (seq == 0) for seq in range(num_seqs)],
        ):
            # The first of these four steps writes the keys and values that the others read.
            start = 0 if num_all % 4 == 0 else 9
            rows = [
                SequenceRows([7 + seq + index for index in range(length)], start, table, 1 if start == 0 else length)
                for seq, (length, table) in enumerate(zip(lengths, places, strict=True))
            ]
            first, second = (torch.as_tensor(engine.forward(rows)).clone() for engine in (graphed, plain))
            num_equal += torch.equal(first, second)
            worst = max(worst, float((first - second).abs().max()))
            num_all += 1
    return num_equal, worst, num_all


def _step_seconds(day: Day, engine: OpenEngine, num_seqs: int) -> float:
    """Returns seconds of a decoding step: the median of 20 forward passes."""
    import torch

    rows = [SequenceRows([5], 40, table, 1) for table in tables(num_seqs, 16 * MAX_BLOCKS, 16)]
    times = []
    for _ in range(23):
        started = time.perf_counter()
        engine.forward(rows)
        if day.is_gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return median(times[3:])


def _compare_answers(day: Day, engine: OpenEngine) -> None:
    rng = random.Random(1)  # noqa: S311 no secret
    vocab_size = engine.loaded.spec.vocab_size
    prompts = [
        [rng.randrange(3, vocab_size) for _ in range(rng.randint(4, MAX_PROMPT_TOKENS))] for _ in range(NUM_ANSWERS)
    ]
    sampler = engine.loaded.open_sampler()
    expected: dict[int, list[int]] = {}
    for size in BATCH_SIZES:
        started = time.monotonic()
        order = list(range(NUM_ANSWERS))
        rng.shuffle(order)
        answers: dict[int, list[int]] = {}
        for first in range(0, NUM_ANSWERS, size):
            group = order[first : first + size]
            answers |= _answer(engine, sampler, group, prompts, [rng.randint(1, len(prompts[each])) for each in group])
        expected = expected or answers
        num_differing = sum(answers[each] != expected[each] for each in order)
        day.tell(
            "company",
            batch_size=size,
            differing=num_differing,
            of=NUM_ANSWERS,
            different_answers=len({tuple(each) for each in answers.values()}),
            seconds=round(time.monotonic() - started, 1),
        )
        day.expect(f"{num_differing} of {NUM_ANSWERS} answers differ at batch size {size}", num_differing == 0)


def _answer(
    engine: OpenEngine, sampler: Sampler, group: Sequence[int], prompts: Sequence[Sequence[int]], cuts: Sequence[int]
) -> dict[int, list[int]]:
    """Returns answers of one batch, by prompt number. `cuts`: the length of the first of each prompt's two chunks."""
    places = dict(zip(group, tables(len(group), 16 * MAX_BLOCKS, 16), strict=True))
    states = {
        each: sampler.start(
            SamplingParams(seed=each, max_tokens=ANSWER_TOKENS, **SAMPLINGS[each % len(SAMPLINGS)]),
            sample=0,
            prompt_token_ids=prompts[each],
        )
        for each in group
    }
    answers: dict[int, list[int]] = {each: [] for each in group}
    computed = dict.fromkeys(group, 0)
    for step in range(ANSWER_TOKENS + 1):
        rows, asked = [], []
        for each, cut in zip(group, cuts, strict=True):
            tokens = [*prompts[each], *answers[each]]
            end = cut if step == 0 else len(tokens)
            if computed[each] == end:  # the first chunk was the whole prompt, and nothing was sampled from it
                computed[each] -= 1
            wants = end == len(tokens) and step > 0
            rows.append(SequenceRows(tokens[computed[each] : end], computed[each], places[each], int(wants)))
            computed[each] = end
            if wants:
                asked.append((each, SampleRows(states[each], end)))
        logits = engine.forward(rows)
        if asked:
            chosen = sampler.sample(logits, [part for _, part in asked]).token_ids
            for (each, _), token in zip(asked, chosen, strict=True):
                answers[each].append(int(token))
                sampler.commit(states[each], [int(token)])
    return answers
