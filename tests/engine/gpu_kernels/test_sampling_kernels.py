"""Our Triton kernels for sampling, in the interpreter: edits, filters and the race, to the oracle's last id."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.engine.sampler import Sampler, SampleRows
from outrider.engine.sampler.edits import LogitEditor, apply_by_kernel
from outrider.engine.sampler.filters import limits_of
from outrider.engine.sampler.order import order_keys
from outrider.request import SamplingParams
from tests.oracle.random_steps import SHAPES, Pair, logits_of, random_known, random_params

pytest.importorskip("triton")
kernels = pytest.importorskip("outrider.engine.sampler.triton_decider")
filters = pytest.importorskip("outrider.engine.gpu_kernels.filters")
race = pytest.importorskip("outrider.engine.gpu_kernels.race")

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _small_programs(monkeypatch):
    """The interpreter computes whole programs: with small ones a small vocabulary has several, of which one is cut."""
    monkeypatch.setattr(filters, "CHUNK", 128)
    monkeypatch.setattr(race, "BLOCKS_PER_PROGRAM", 2)


def by_kernels(sampler):
    """The sampler, deciding as on a GPU."""
    editor = LogitEditor(sampler._editor.vocabulary, apply_by_kernel)
    sampler._editor, sampler._decider = editor, kernels.TritonDecider(editor)
    return sampler


def test_golden_arrivals_decide_a_flat_row(monkeypatch):
    monkeypatch.setattr(race, "BLOCKS_PER_PROGRAM", 64)
    sampler = by_kernels(Sampler(vocab_size=49152, known_token_ids=torch.ones(49152, dtype=torch.bool)))
    state = sampler.start(SamplingParams(seed=0x0123456789ABCDEF, max_tokens=9), sample=0, prompt_token_ids=[])
    assert sampler.sample(torch.zeros(1, 49152), [SampleRows(state, 1000)]).token_ids == [20435]


@pytest.mark.parametrize("vocab_size", [1, 65, 200])
def test_decisions_are_those_of_the_oracle(vocab_size, is_full):
    rng = np.random.default_rng(vocab_size)
    for _ in range(2 if is_full else 1):
        pair = Pair(vocab_size, random_known(rng, vocab_size))
        by_kernels(pair.samplers[0])
        pair.check_random_step(rng, num_sequences=3)


@pytest.mark.parametrize(
    ("shape", "num_ids"), [*((shape, 150) for shape in SHAPES[1::2]), ("ties", 300), ("zipf", 256)]
)
def test_limits_of_every_filter_are_torchs(shape, num_ids):
    """To the last id, ties included: torch sorts. Rows with NaN, or with nothing left, have no order to limit."""
    rng = np.random.default_rng(3)
    settings = [
        {"top_k": 7},
        {"top_p": 0.7},
        {"min_p": 0.3},
        {"top_k": num_ids - 1, "top_p": 0.95, "min_p": 0.01},
        {"top_p": 1e-6, "min_p": 1e-30},
        {"top_p": 1.0 - 2.0**-53},
    ]
    params = [SamplingParams(seed=1, max_tokens=9, temperature=0.7, **each) for each in settings]
    values = torch.from_numpy(np.stack([logits_of(shape, num_ids, rng) for _ in params]))
    sampler = Sampler(vocab_size=num_ids, known_token_ids=torch.ones(num_ids, dtype=torch.bool))
    states = [sampler.start(each, sample=0, prompt_token_ids=[]) for each in params]
    decisions = [decision for state in states for decision in SampleRows(state, 5).decisions()]
    table = kernels.DecisionTable.of(decisions, num_ids=num_ids, device=CPU)
    found = kernels.limits_of(values, table.words, has_top_k=table.has_top_k, has_top_p=table.has_top_p)

    divided = values / np.float32(0.7)
    keys = order_keys(divided)
    expected = limits_of(params, divided, keys).squeeze(1)
    kept = [keys >= limits.unsqueeze(1) for limits in (found, expected)]
    has_order = values.amax(dim=1) > -torch.inf
    assert torch.equal(kept[0][has_order], kept[1][has_order])
    assert (kept[0][has_order].sum(dim=1) >= 1).all()


def test_rows_without_filters_have_no_limits_and_ask_for_none(monkeypatch):
    sampler = by_kernels(Sampler(vocab_size=70, known_token_ids=torch.ones(70, dtype=torch.bool)))
    rng = np.random.default_rng(5)
    params = random_params(rng, 70, temperature=0.0, top_p=0.5, logit_bias=())
    state = sampler.start(params, sample=0, prompt_token_ids=[])
    monkeypatch.setattr(kernels, "limits_of", None)
    logits = torch.from_numpy(rng.standard_normal((3, 70)).astype(np.float32))
    greedy = sampler.sample(logits, [SampleRows(state, 5, (1, 2))]).token_ids
    assert len(greedy) == 3
