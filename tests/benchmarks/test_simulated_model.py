from __future__ import annotations

import numpy as np
import pytest

from benchmarks.three_lines.simulated_model import (
    ORDER,
    SetTime,
    SimulatedKVCache,
    SimulatedModel,
    SimulatedRunner,
    noise_for,
)
from outrider.engine.input_batch import SequenceRows, build_input_batch

MODEL = SimulatedModel(vocab_size=64)


def test_logits_are_those_of_the_last_tokens_in_every_process():
    text = list(range(20))
    assert (MODEL.logits(text) == SimulatedModel(vocab_size=64).logits(text[-ORDER:])).all()
    assert (MODEL.logits(text) != MODEL.logits([*text[:-1], 0])).any()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_drafter_agrees_as_often_as_it_was_asked_to(temperature):
    noise = noise_for(0.8, temperature=temperature, vocab_size=64)
    drafter = SimulatedModel(vocab_size=64, noise=noise)
    random = np.random.default_rng(3)
    agreed = 0
    for text in random.integers(0, 64, size=(400, ORDER)).tolist():
        luck = temperature * random.gumbel(size=64)
        agreed += int((MODEL.logits(text) + luck).argmax() == (drafter.logits(text) + luck).argmax())
    assert 0.72 < agreed / 400 < 0.88


def test_the_runner_reads_texts_through_block_tables_and_follows_copies():
    cache = SimulatedKVCache(num_blocks=8, block_size=4)
    runner = SimulatedRunner(MODEL, cache, SetTime(0.0))
    text = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    runner.forward(build_input_batch([SequenceRows(text, 0, [5, 2, 7], num_logits=0)], 4))
    cache.copy_blocks([(7, 1)])
    rows = [SequenceRows([8], 10, [5, 2, 1], num_logits=1), SequenceRows([9], 10, [5, 2, 7], num_logits=1)]
    logits = runner.forward(build_input_batch(rows, 4))
    assert (logits == np.stack([MODEL.logits([*text, 8]), MODEL.logits([*text, 9])])).all()


def test_overhead_between_forwards_is_hidden_where_it_is_asked_for(monkeypatch):
    now, slept = [100.0], []
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr(
        "time.sleep", lambda seconds: (slept.append(round(seconds, 6)), now.__setitem__(0, now[0] + seconds))
    )
    cache = SimulatedKVCache(num_blocks=8, block_size=4)
    batch = build_input_batch([SequenceRows([1], 0, [0], num_logits=1)], 4)
    for hides_overhead in (False, True):
        runner = SimulatedRunner(MODEL, cache, SetTime(0.01, hides_overhead=hides_overhead))
        for pause in (0.0, 0.004, 1.0):
            now[0] += pause
            runner.forward(batch)
    assert slept == [0.01, 0.01, 0.01, 0.01, 0.006, 0.01]
