"""Our Triton kernels for sampling, in the interpreter: edits, filters and the race give exactly the oracle's ids."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.engine.sampler import Sampler, SampleRows
from outrider.engine.sampler.filters import limits_of
from outrider.engine.sampler.order import order_keys
from outrider.request import SamplingParams
from tests.oracle.random_steps import SHAPES, Pair, logits_of, random_known, random_params

pytest.importorskip("triton")
kernels = pytest.importorskip("outrider.engine.sampler.triton_decider")
filters = pytest.importorskip("outrider.engine.gpu_kernels.filters")
race = pytest.importorskip("outrider.engine.gpu_kernels.race")
decide_by_kernels = pytest.importorskip("tests.support.rolling").decide_by_kernels

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _small_programs(monkeypatch):
    """Makes programs so small that a small vocabulary has several of them, the last of which is partly empty."""
    monkeypatch.setattr(filters, "CHUNK", 64)
    monkeypatch.setattr(filters, "LANES", 16)
    monkeypatch.setattr(filters, "SLICES", 4)
    monkeypatch.setattr(filters, "BINS", 32)
    monkeypatch.setattr(filters, "MAX_LISTED", 100)
    monkeypatch.setattr(race, "BLOCKS_PER_PROGRAM", 2)


def test_golden_arrivals_decide_a_flat_row(monkeypatch):
    monkeypatch.setattr(race, "BLOCKS_PER_PROGRAM", 64)
    sampler = decide_by_kernels(Sampler(vocab_size=49152, known_token_ids=torch.ones(49152, dtype=torch.bool)))
    state = sampler.start(SamplingParams(seed=0x0123456789ABCDEF, max_tokens=9), sample=0, prompt_token_ids=[])
    assert sampler.sample(torch.zeros(1, 49152), [SampleRows(state, 1000)]).token_ids == [20435]


@pytest.mark.parametrize("vocab_size", [1, 65, 200])
def test_decisions_are_those_of_the_oracle(vocab_size, is_full):
    rng = np.random.default_rng(vocab_size)
    for _ in range(2 if is_full else 1):
        pair = Pair(vocab_size, random_known(rng, vocab_size))
        decide_by_kernels(pair.samplers[0])
        pair.check_random_step(rng, num_sequences=3)


FILTERS = [
    {"top_k": 7},
    {"top_p": 0.7},
    {"min_p": 0.3},
    {"top_k": 149, "top_p": 0.95, "min_p": 0.01},
    {"top_k": 60, "top_p": 0.5},
    {"top_p": 1e-6, "min_p": 1e-30},
    {"top_p": 1.0 - 2.0**-53},
    {"top_k": 1, "top_p": 0.9},
]


def check_limits(values, params):
    """Compares limits and ties with those that torch finds by sorting. Rows with NaN and ids at -inf are excluded."""
    num_ids = values.shape[1]
    sampler = Sampler(vocab_size=num_ids, known_token_ids=torch.ones(num_ids, dtype=torch.bool))
    states = [sampler.start(each, sample=0, prompt_token_ids=[]) for each in params]
    decisions = [decision for state in states for decision in SampleRows(state, 5).decisions()]
    table = torch.from_numpy(decide_by_kernels(sampler).decider.table(decisions))
    found = kernels.limits_of(values, table)

    divided = values / torch.tensor([[each.temperature] for each in params])
    keys = order_keys(divided)
    expected = limits_of(params, divided, keys).squeeze(1)
    kept = [(keys >= limits.unsqueeze(1)) & (divided > -torch.inf) for limits in (found, expected)]
    has_order = divided.amax(dim=1) > -torch.inf
    assert torch.equal(kept[0][has_order], kept[1][has_order])
    assert (kept[0][has_order].sum(dim=1) >= 1).all()
    return kept[0].sum(dim=1).tolist()


TEMPERATURES = (0.7, 0.02, 1e30)


@pytest.mark.parametrize(
    ("shape", "temperature"),
    [
        pytest.param(shape, temperature, marks=[pytest.mark.full] * ((place + other) % 3 > 0))
        for place, shape in enumerate(SHAPES)
        for other, temperature in enumerate(TEMPERATURES)
    ],
)
def test_limits_of_every_filter_are_torchs(shape, temperature, is_full):
    """The list of candidates has room for 100 tokens here, which is too few for some rows."""
    rng = np.random.default_rng(3)
    for num_ids in (1, 17, 150, 500) if is_full else (150,):
        params = [SamplingParams(seed=1, max_tokens=9, temperature=temperature, **each) for each in FILTERS]
        values = torch.from_numpy(np.stack([logits_of(shape, num_ids, rng) for _ in params]))
        check_limits(values, params)


FULL_ONLY = [pytest.param(shape, marks=pytest.mark.full) for shape in ("equal", "flat")]


@pytest.mark.parametrize("shape", ["normal", *FULL_ONLY])
def test_a_whole_vocabulary_is_limited_by_programs_of_their_real_size(shape, monkeypatch, is_full):
    """In some of these rows every token is a candidate, so the list has no room for all of them."""
    num_ids = 128_256 if is_full else 32_000
    monkeypatch.undo()
    rng = np.random.default_rng(4)
    params = [
        SamplingParams(seed=1, max_tokens=9, **each)
        for each in ({"top_k": 50, "top_p": 0.9}, {"top_p": 0.7}, {"temperature": 0.1, "top_k": 5000})
    ]
    values = np.stack([logits_of(shape, num_ids, rng) for _ in params])
    values[:, -256:] -= 30.0  # unlikely ids side by side must not lower the smallest class maximum
    num_kept = check_limits(torch.from_numpy(values), params)
    assert num_kept[0] <= 50
    assert (num_kept[1] < filters.MAX_LISTED) == (shape == "normal")


def blind(monkeypatch, *names):
    """Makes kernels see rows without tokens."""

    class Blind:
        def __init__(self, kernel):
            self._kernel = kernel

        def __getitem__(self, grid):
            launch = self._kernel[grid]
            return lambda values, *rest, **options: launch(torch.full_like(values, -torch.inf), *rest, **options)

    for name in names:
        monkeypatch.setattr(filters, name, Blind(getattr(filters, name)))


def test_a_list_that_is_enough_is_all_that_is_searched(monkeypatch):
    """If few tokens of a row are likely or allowed, only the first list of candidates is made and searched."""
    blind(monkeypatch, "fill_bins", "list_bins", "filter_limits")
    rng = np.random.default_rng(6)
    values = torch.from_numpy(rng.standard_normal((5, 300)).astype(np.float32) * 3)
    values[2, 9:] = -torch.inf  # by a constraint
    settings = ({"top_k": 7}, {"top_p": 0.5}, {"top_k": 50, "top_p": 0.9}, {"top_k": 60, "min_p": 0.2}, {"top_k": 1})
    check_limits(values, [SamplingParams(seed=1, max_tokens=9, **each) for each in settings])
    with pytest.raises(AssertionError):
        check_limits(values, [SamplingParams(seed=1, max_tokens=9, top_k=299)] * 5)


def test_a_row_that_keeps_many_tokens_has_another_list(monkeypatch):
    """One program reads a whole row only if very many of its tokens have the same value."""
    blind(monkeypatch, "filter_limits")
    rng = np.random.default_rng(6)
    values = torch.from_numpy(rng.standard_normal((6, 300)).astype(np.float32) * 3)
    values[0, 100] = -1e30
    settings = (
        {"top_k": 270},
        {"top_k": 250, "min_p": 1e-9},
        {"top_k": 150, "temperature": 1e30},
        {"top_p": 0.95, "temperature": 100.0},
        {"top_p": 0.999, "temperature": 3.0, "min_p": 1e-6},
        {"top_p": 1.0 - 2.0**-53, "temperature": 10.0},
    )
    check_limits(values, [SamplingParams(seed=1, max_tokens=9, **each) for each in settings])
    with pytest.raises(AssertionError):
        check_limits(torch.zeros(1, 300), [SamplingParams(seed=1, max_tokens=9, top_k=270)])


def test_rows_without_filters_have_no_limits_and_ask_for_none(monkeypatch):
    sampler = decide_by_kernels(Sampler(vocab_size=70, known_token_ids=torch.ones(70, dtype=torch.bool)))
    rng = np.random.default_rng(5)
    params = random_params(rng, 70, temperature=0.0, top_p=0.5, logit_bias=())
    state = sampler.start(params, sample=0, prompt_token_ids=[])
    monkeypatch.setattr(kernels, "limits_of", None)
    logits = torch.from_numpy(rng.standard_normal((3, 70)).astype(np.float32))
    greedy = sampler.sample(logits, [SampleRows(state, 5, (1, 2))]).token_ids
    assert len(greedy) == 3
