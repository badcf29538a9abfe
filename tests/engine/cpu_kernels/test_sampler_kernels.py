"""Native and numpy decisions are the same ids, and what they are made of the same bits."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from outrider.engine.cpu_kernels.sampler_structs import SampleRowsStruct
from outrider.engine.sampler import Sampler, SampleRows
from outrider.engine.sampler.arrivals import BLOCK_SIZE, RaceKey, block_arrivals, waits_behind_winner
from outrider.engine.sampler.decider import Vocabulary
from outrider.engine.sampler.elementary import logarithm, masses_of
from outrider.engine.sampler.native_decider import NativeDecider
from outrider.request import SamplingParams
from tests.engine.cpu_kernels.libraries import with_few_for_tests


@pytest.fixture(params=[1, 3], ids=["alone", "team of three"])
def kernels(request, library, teams):
    return teams(library, request.param)


# ---- what decisions are made of


def all_arrivals(key, num_ids):
    """Full evaluation by numpy: [num_ids] float32."""
    num_blocks = -(-num_ids // BLOCK_SIZE)
    blocks = block_arrivals(key.seed, key.sample, [key.position], num_blocks)
    groups = np.arange(num_blocks * 16)
    times = blocks.first[0][:, None] + waits_behind_winner([key], np.zeros_like(groups), groups).reshape(-1, 64)
    times[np.arange(num_blocks), blocks.winner_offsets[0]] = blocks.first[0]
    return times.reshape(-1)[:num_ids]


@pytest.mark.parametrize("num_ids", [1, 64, 1000, 49_152, 151_936])
def test_arrivals_are_the_same_bits(library, num_ids):
    for key in (RaceKey(0, 0, 0), RaceKey(0x0123456789ABCDEF, 3, 1000), RaceKey(2**64 - 1, 63, 2**32 - 1)):
        arrivals = np.empty(num_ids, dtype=np.float32)
        library.functions.outrider_arrivals(key.seed, key.sample, key.position, num_ids, arrivals.ctypes.data)
        assert np.array_equal(arrivals.view(np.int32), all_arrivals(key, num_ids).view(np.int32))


def test_logarithms_are_the_same_bits(library):
    values = np.exp(np.random.default_rng(0).uniform(-28, 4, 200_001)).astype(np.float32)
    logarithms = np.empty_like(values)
    library.functions.outrider_logarithms(values.ctypes.data, len(values), logarithms.ctypes.data)
    assert np.array_equal(logarithms.view(np.int32), logarithm(values).view(np.int32))


@pytest.mark.parametrize("largest", [0.0, 12.5, np.inf])
def test_masses_are_the_same_integers(library, largest):
    values = np.float32(largest) - np.random.default_rng(0).uniform(0, 40, 200_001).astype(np.float32)
    values[:2] = [largest, -np.inf]
    masses = np.empty(len(values), dtype=np.int64)
    library.functions.outrider_masses(values.ctypes.data, len(values), largest, masses.ctypes.data)
    assert np.array_equal(masses, masses_of(values, np.float32(largest)))


# ---- decisions


def logits_of(shape, vocab_size, rng):
    """One row: [vocab_size] float32."""
    noise = rng.standard_normal(vocab_size)
    ranks = np.log(np.arange(1, vocab_size + 1))
    with np.errstate(over="ignore"):
        row = {
            "flat": noise * 0.01,
            "equal": noise * 0,
            "normal": noise * 2.5,
            "zipf": rng.permutation(-1.3 * ranks) + noise * 0.3,
            "peaked": rng.permutation(-8 * ranks),
            "certain": np.where(np.arange(vocab_size) == vocab_size // 3, 500.0, noise),
            "ties": np.round(noise * 2) / 2,
            "bfloat16": noise * 4,
            "banned": np.where(noise > 0.5, -np.inf, noise * 3),
            "one left": np.where(np.arange(vocab_size) == vocab_size - 1, -30.0, -np.inf),
            "nothing left": noise - np.inf,
            "nan": np.where(noise > 3, np.nan, noise),
            "huge": noise * 1e38,
            "infinite": np.where(noise > 2.5, np.inf, noise),
        }[shape].astype(np.float32)
    return (row.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32) if shape == "bfloat16" else row


SHAPES = [
    "flat",
    "equal",
    "normal",
    "zipf",
    "peaked",
    "certain",
    "ties",
    "bfloat16",
    "banned",
    "one left",
    "nothing left",
    "nan",
    "huge",
    "infinite",
]


def random_params(rng, vocab_size):
    choices = {
        "temperature": [0.0, 0.3, 0.7, 1.0, 1.0, 1.5, 20.0, 1e30],
        "top_p": [1.0, 1.0, 1.0, 1e-6, 0.1, 0.5, 0.9, 0.95, 0.999],
        "top_k": [0, 0, 0, 1, 2, 20, 100, 1000, 30_000],
        "min_p": [0.0, 0.0, 0.0, 1e-30, 0.01, 0.1, 1.0],
        "repetition_penalty": [1.0, 1.0, 1.0, 0.7, 1.3],
        "frequency_penalty": [0.0, 0.0, -1.9, 0.3, 1.1],
        "presence_penalty": [0.0, 0.0, -1.1, 0.7],
        "min_tokens": [0, 0, 3, 12],
    }
    settings = {name: values[rng.integers(len(values))] for name, values in choices.items()}
    biased = sorted({int(token_id) for token_id in rng.integers(0, vocab_size + 2, rng.choice([0, 0, 4]))})
    biases = [-100.0, 5.0, 3e38, -3e38]
    logit_bias = tuple((token_id, biases[rng.integers(len(biases))]) for token_id in biased)
    return SamplingParams(seed=int(rng.integers(2**63)) * 2 + 1, max_tokens=99, logit_bias=logit_bias, **settings)


def some_ids(rng, limit, most):
    return rng.integers(0, limit, rng.integers(0, most + 1)).tolist()


def random_known(rng, vocab_size):
    """Padding at the end and holes, sometimes; at least one id is known."""
    known = np.ones(vocab_size, dtype=np.bool_)
    if rng.random() < 0.5:
        known[vocab_size - int(rng.integers(0, vocab_size // 3 + 1)) :] = False
    if rng.random() < 0.5:
        known[rng.integers(0, vocab_size, 3)] = False
    known[rng.integers(vocab_size)] = True
    return known


class Pair:
    """The same samples in a sampler of each kind."""

    def __init__(self, vocab_size, known, kernels):
        mask = torch.from_numpy(known)
        self.samplers = [Sampler(vocab_size=vocab_size, known_token_ids=mask, kernels=each) for each in (kernels, None)]

    def start(self, params, *, committed, **options):
        states = [sampler.start(params, **options) for sampler in self.samplers]
        for sampler, state in zip(self.samplers, states, strict=True):
            for token_id in committed:
                sampler.commit(state, [token_id])
        return states

    def decide(self, logits, parts):
        """`parts`: (states, position, draft ids, assumed ids). Returns what each sampler decides."""
        return [
            sampler.sample(logits, [SampleRows(states[i], *rest) for states, *rest in parts]).token_ids
            for i, sampler in enumerate(self.samplers)
        ]


def random_step(rng, pair, vocab_size, num_sequences, shapes=SHAPES):
    """Some sequences of random parameters, histories and drafts, and their logits."""
    parts, rows = [], []
    for _ in range(num_sequences):
        states = pair.start(
            random_params(rng, vocab_size),
            committed=some_ids(rng, vocab_size + 2, 80),
            sample=int(rng.integers(64)),
            prompt_token_ids=some_ids(rng, vocab_size + 2, 200),
            generated_token_ids=some_ids(rng, vocab_size, 80),
            stop_token_ids=some_ids(rng, vocab_size + 2, 3),
        )
        draft, assumed = some_ids(rng, min(vocab_size + 2, 40), 4), some_ids(rng, min(vocab_size + 2, 20), 3)
        parts.append((states, int(rng.integers(2**20)), tuple(draft), tuple(assumed)))
        rows += [logits_of(shapes[rng.integers(len(shapes))], vocab_size, rng) for _ in range(len(draft) + 1)]
    return torch.from_numpy(np.stack(rows)), parts


NUM_STEPS = {1: 20, 2: 20, 63: 30, 64: 30, 65: 30, 300: 40, 1000: 40, 5000: 20, 49_152: 4, 151_936: 2}
"""Random steps by size of the vocabulary."""


@pytest.mark.parametrize(
    ("library", "vocab_size", "num_steps"),
    with_few_for_tests({str(size): (size, num) for size, num in NUM_STEPS.items()}, few=("2", "65", "1000")),
    indirect=["library"],
)
def test_decisions_are_those_of_numpy(kernels, vocab_size, num_steps):
    """Whatever the logits, parameters, histories and drafts: not one id differs."""
    rng = np.random.default_rng(vocab_size)
    for _ in range(num_steps):
        pair = Pair(vocab_size, random_known(rng, vocab_size), kernels)
        logits, parts = random_step(rng, pair, vocab_size, num_sequences=8)
        before = logits.clone()
        native, by_numpy = pair.decide(logits, parts)
        assert native == by_numpy
        assert torch.equal(logits.view(torch.int32), before.view(torch.int32))


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_of_logits_is_decided_as_by_numpy(kernels, shape):
    rng = np.random.default_rng(7)
    pair = Pair(3000, np.ones(3000, dtype=np.bool_), kernels)
    for _ in range(4):
        logits, parts = random_step(rng, pair, 3000, num_sequences=12, shapes=[shape])
        native, by_numpy = pair.decide(logits, parts)
        assert native == by_numpy


def test_another_position_would_be_noticed(kernels):
    """Negative control: decisions do depend on what is compared."""
    rng = np.random.default_rng(3)
    pair = Pair(1000, np.ones(1000, dtype=np.bool_), kernels)
    logits = torch.from_numpy(np.stack([logits_of("normal", 1000, rng) for _ in range(64)]))
    states = pair.start(SamplingParams(seed=4, max_tokens=99), committed=[], sample=0, prompt_token_ids=[])
    native, by_numpy = (
        sampler.sample(logits, [SampleRows(state, position, (0,) * 63)]).token_ids
        for sampler, state, position in zip(pair.samplers, states, (5, 6), strict=True)
    )
    assert sum(one == other for one, other in zip(native, by_numpy, strict=True)) < 20


def test_a_row_depends_neither_on_other_rows_nor_on_threads(library, teams):
    rng = np.random.default_rng(11)
    vocab_size = 2000
    known = random_known(rng, vocab_size)
    pair = Pair(vocab_size, known, teams(library, 1))
    logits, parts = random_step(rng, pair, vocab_size, num_sequences=30)
    together = pair.decide(logits, parts)[0]
    alone, start = [], 0
    for part in parts:
        num_rows = 1 + len(part[2])
        alone += pair.decide(logits[start : start + num_rows], [part])[0]
        start += num_rows
    assert alone == together
    threaded = Sampler(vocab_size=vocab_size, known_token_ids=torch.from_numpy(known), kernels=teams(library, 4))
    for _ in range(20):
        assert threaded.sample(logits, [SampleRows(states[0], *rest) for states, *rest in parts]).token_ids == together


def test_a_history_that_grows_is_followed(kernels):
    """Counts live in arrays that are replaced as they grow, while the kernels hold their addresses."""
    vocab_size = 500
    pair = Pair(vocab_size, np.ones(vocab_size, dtype=np.bool_), kernels)
    params = SamplingParams(seed=1, max_tokens=999, frequency_penalty=1.5, presence_penalty=0.5, repetition_penalty=1.2)
    states = pair.start(params, committed=[], sample=0, prompt_token_ids=[1, 2, 3])
    rng = np.random.default_rng(5)
    for position in range(300):
        logits = torch.from_numpy(logits_of("normal", vocab_size, rng)[None])
        native, by_numpy = pair.decide(logits, [(states, position, (), ())])
        assert native == by_numpy
        for sampler, state in zip(pair.samplers, states, strict=True):
            sampler.commit(state, native)


def test_holes_are_left_out_of_greedy_rows(kernels):
    """Also where all else of the row decides alone: holes are looked at only where one is the largest."""
    known = np.ones(200, dtype=np.bool_)
    known[[0, 77, 130]] = False
    pair = Pair(200, known, kernels)
    states = pair.start(
        SamplingParams(seed=1, max_tokens=99, temperature=0.0), committed=[], sample=0, prompt_token_ids=[]
    )
    logits = torch.zeros((6, 200))
    logits[0, 5] = 1.0
    logits[1, [77, 78]] = torch.tensor([2.0, 1.0])
    logits[2, [77, 90]] = torch.nan
    logits[3, 130] = torch.nan
    logits[4] = -torch.inf
    logits[5, 199] = torch.nan
    native, by_numpy = pair.decide(logits, [(states, 9, (5, 78, 90, 1, 0), ())])
    assert native == by_numpy == [5, 78, 90, 1, 0, 199]


def test_memory_that_cannot_be_had_is_an_error_and_the_sampler_stays_usable(kernels):
    with pytest.raises(MemoryError, match="token ids"):
        NativeDecider(kernels, Vocabulary(2**46, 2**46, np.empty(0, dtype=np.int64)))
    pair = Pair(100, np.ones(100, dtype=np.bool_), kernels)
    states = pair.start(SamplingParams(seed=1, max_tokens=99), committed=[], sample=0, prompt_token_ids=[])
    logits = torch.from_numpy(logits_of("normal", 100, np.random.default_rng(0))[None])
    step = [(states, 3, (), ())]
    native, by_numpy = pair.decide(logits, step)
    address = states[0].prepared.current()
    rows = SampleRowsStruct(sampling=address, num_rows=2**44)
    sampler = pair.samplers[0]._decider._sampler
    with pytest.raises(MemoryError, match="outrider_sample"):
        kernels.library.functions.outrider_sample(
            sampler, logits.data_ptr(), 100, ctypes.addressof(rows), 1, None, None
        )
    assert pair.decide(logits, step) == [native, by_numpy]
    assert native == by_numpy
