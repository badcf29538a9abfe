"""Draft trees through the whole decode loop: a draft model's siblings, the controller's choice, the verdict, the KV."""

from __future__ import annotations

import pytest
import torch

from outrider.cli.three_lines.decode_side import ColocatedDrafts, SimulatedDecodeNode
from outrider.cli.three_lines.simulation import Simulation, simulated_drafter
from outrider.engine.simulated_model import noise_for

VOCAB_SIZE = 64
PROMPTS = [[1, 2, 3], [4, 5, 6]]
SIMULATION = Simulation(
    step_seconds=0.0, token_seconds=0.0, acceptance=0.4, num_speculative_tokens=8, vocab_size=VOCAB_SIZE
)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_are_the_same_with_and_without_siblings(temperature, monkeypatch):
    noise = noise_for(SIMULATION.acceptance, temperature=temperature, vocab_size=VOCAB_SIZE)
    texts, accepted = [], []
    for takes_trees in (False, True):
        node = SimulatedDecodeNode(SIMULATION, ColocatedDrafts(simulated_drafter(SIMULATION, noise=noise)))
        monkeypatch.setattr(node._loop._drafts, "_takes_trees", takes_trees)
        texts.append(node.answer(PROMPTS, temperature=temperature, max_tokens=60))
        accepted.append(node.passed.counts.num_accepted_draft_tokens)
        node._engine.pool.check_integrity(())
    assert texts[0] == texts[1]
    assert min(accepted) > 0
