"""Native kernels decide the same ids as the oracle, and their arrivals, logarithms and masses have the same bits."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.engine.cpu_kernels.interface import structures
from outrider.engine.sampler import SampleRows
from outrider.engine.sampler.edits import Vocabulary
from outrider.engine.sampler.native_decider import NativeDecider
from outrider.request import SamplingParams
from tests.engine.cpu_kernels.libraries import with_few_for_tests
from tests.oracle.arrivals import RaceKey, all_arrivals
from tests.oracle.elementary import logarithm, masses_of
from tests.oracle.random_steps import NUM_STEPS, SHAPES, Pair, logits_of, random_known
from tests.support.sampler_kinds import NUMPY


def by(kernels):
    return NUMPY._replace(kernels=kernels)


@pytest.fixture(params=[1, 3], ids=["alone", "team of three"])
def kernels(request, library, teams):
    return teams(library, request.param)


# ---- the steps of a decision


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


@pytest.mark.parametrize(
    ("library", "vocab_size", "num_steps"),
    with_few_for_tests({str(size): (size, num) for size, num in NUM_STEPS.items()}, few=("2", "65", "1000")),
    indirect=["library"],
)
def test_decisions_are_those_of_the_oracle(library, teams, vocab_size, num_steps, is_full):
    """With one thread and with three, no id differs, whatever the logits, parameters, histories and drafts are."""
    kinds = [by(teams(library, num_threads)) for num_threads in (1, 3)]
    rng = np.random.default_rng(vocab_size)
    for _ in range(num_steps if is_full else -(-num_steps // 4)):
        Pair(vocab_size, random_known(rng, vocab_size), *kinds).check_random_step(rng, num_sequences=8)


@pytest.mark.pairwise
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_of_logits_is_decided_as_expected(library, teams, shape, is_full):
    rng = np.random.default_rng(7)
    pair = Pair(3000, np.ones(3000, dtype=np.bool_), by(teams(library, 1)), by(teams(library, 3)))
    for _ in range(4 if is_full else 2):
        pair.check_random_step(rng, num_sequences=12, shapes=[shape])


def test_another_position_would_be_noticed(kernels):
    """Negative control: decisions depend on the position."""
    rng = np.random.default_rng(3)
    pair = Pair(1000, np.ones(1000, dtype=np.bool_), by(kernels))
    logits = np.stack([logits_of("normal", 1000, rng) for _ in range(64)])
    states = pair.start(SamplingParams(seed=4, max_tokens=99), committed=[], sample=0, prompt_token_ids=[])
    native, expected = (
        sampler.sample(logits, [SampleRows(state, position, (0,) * 63)]).token_ids
        for sampler, state, position in zip(pair.samplers, states, (5, 6), strict=True)
    )
    assert sum(one == other for one, other in zip(native, expected, strict=True)) < 20


def test_a_history_that_grows_is_followed(kernels):
    """Arrays of counts are replaced as they grow, and the kernels must get the addresses of the new arrays."""
    vocab_size = 500
    pair = Pair(vocab_size, np.ones(vocab_size, dtype=np.bool_), by(kernels))
    params = SamplingParams(seed=1, max_tokens=999, frequency_penalty=1.5, presence_penalty=0.5, repetition_penalty=1.2)
    states = pair.start(params, committed=[], sample=0, prompt_token_ids=[1, 2, 3])
    rng = np.random.default_rng(5)
    for position in range(300):
        logits = logits_of("normal", vocab_size, rng)[None]
        native, expected = pair.decide(logits, [(states, position, (), ())])
        assert native == expected
        for sampler, state in zip(pair.samplers, states, strict=True):
            sampler.commit(state, native)


def test_holes_are_left_out_of_greedy_rows(kernels):
    """Holes are unknown ids. In rows without edits, they are checked only if one of them has the largest logit."""
    known = np.ones(200, dtype=np.bool_)
    known[[0, 77, 130]] = False
    pair = Pair(200, known, by(kernels))
    states = pair.start(
        SamplingParams(seed=1, max_tokens=99, temperature=0.0), committed=[], sample=0, prompt_token_ids=[]
    )
    logits = np.zeros((6, 200), dtype=np.float32)
    logits[0, 5] = 1.0
    logits[1, [77, 78]] = [2.0, 1.0]
    logits[2, [77, 90]] = np.nan
    logits[3, 130] = np.nan
    logits[4] = -np.inf
    logits[5, 199] = np.nan
    native, expected = pair.decide(logits, [(states, 9, (5, 78, 90, 1, 0), ())])
    assert native == expected == [5, 78, 90, 1, 0, 199]


def test_memory_that_cannot_be_had_is_an_error_and_the_sampler_stays_usable(kernels):
    with pytest.raises(MemoryError, match="token ids"):
        NativeDecider(kernels, Vocabulary(2**46, 2**46, np.empty(0, dtype=np.int64)))
    pair = Pair(100, np.ones(100, dtype=np.bool_), by(kernels))
    states = pair.start(SamplingParams(seed=1, max_tokens=99), committed=[], sample=0, prompt_token_ids=[])
    logits = logits_of("normal", 100, np.random.default_rng(0))[None]
    step = [(states, 3, (), ())]
    native, expected = pair.decide(logits, step)
    address = states[0].prepared.current()
    rows = structures.OutriderSampleRows(sampling=address, num_rows=2**44)
    sampler = pair.samplers[0].decider._sampler.handle
    with pytest.raises(MemoryError, match="outrider_sample"):
        kernels.library.functions.outrider_sample(sampler, logits.ctypes.data, 100, rows, 1, None, None)
    assert pair.decide(logits, step) == [native, expected]
    assert native == expected
