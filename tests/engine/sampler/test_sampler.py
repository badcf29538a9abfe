from __future__ import annotations

import numpy as np
import pytest

from outrider.engine.sampler import SampleRows
from outrider.engine.sampler.order import first_argmax
from outrider.errors import InternalError
from outrider.request import LogprobsMode, LogprobsRequest
from tests.engine.sampler.reference import params_of

VOCAB_SIZE = 300


def random_logits(num_rows, vocab_size=VOCAB_SIZE, seed=0):
    noise = np.random.default_rng(seed).standard_normal((num_rows, vocab_size)) * 2
    return np.round(noise * 8).astype(np.float32) / 8


def zeros(num_rows, vocab_size=VOCAB_SIZE):
    return np.zeros((num_rows, vocab_size), dtype=np.float32)


def draw(sampler, logits, params, *, sample=0, position=0, prompt=()):
    """Draws the tokens of consecutive positions, one for each row."""
    state = sampler.start(params, sample=sample, prompt_token_ids=prompt)
    return sampler.sample(logits, [SampleRows(state, position, (0,) * (len(logits) - 1))]).token_ids


SETTINGS = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.7, "top_p": 0.95},
    {"top_k": 40, "min_p": 0.01},
    {"repetition_penalty": 1.3, "top_p": 0.9},
    {"temperature": 0.0, "presence_penalty": 1.0},
    {"min_tokens": 9, "logit_bias": ((3, 3.0),)},
]


def test_a_row_does_not_depend_on_its_batch(make_sampler):
    """It has the same token and the same bits of logprobs alone, with any other rows, and at any place among them."""
    rng = np.random.default_rng(1)
    sampler, fresh = make_sampler(VOCAB_SIZE), make_sampler(VOCAB_SIZE)
    logits = random_logits(42)
    wanted = LogprobsRequest(num_top=2, mode=LogprobsMode.SAMPLED)

    def start(some_sampler, i):
        params = params_of(seed=i // 3, **SETTINGS[i % len(SETTINGS)])
        asks = wanted if i % 4 == 0 else None
        return some_sampler.start(
            params, sample=i % 3, prompt_token_ids=[i, 2], generated_token_ids=[4, i], stop_token_ids=[0], logprobs=asks
        )

    alone = {i: fresh.sample(logits[i : i + 1], [SampleRows(start(fresh, i), 10 + i)]) for i in range(42)}
    for _ in range(12):
        chosen = rng.permutation(42)[: rng.integers(1, 43)].tolist()
        together = sampler.sample(logits[chosen], [SampleRows(start(sampler, i), 10 + i) for i in chosen])
        assert together.token_ids == [alone[i].token_ids[0] for i in chosen]
        assert together.logprobs == [alone[i].logprobs[0] for i in chosen]


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 9.9e-6])
def test_below_the_greedy_temperature_the_largest_logit_is_taken(make_sampler, temperature):
    logits = random_logits(64)
    expected = [int(np.flatnonzero(row == row.max())[0]) for row in logits]
    assert draw(make_sampler(VOCAB_SIZE), logits, params_of(temperature=temperature, top_k=2)) == expected


def test_temperature_limits(make_sampler):
    sampler = make_sampler(VOCAB_SIZE)
    logits = np.tile(np.arange(VOCAB_SIZE, dtype=np.float32), (256, 1))
    assert set(draw(sampler, logits, params_of(temperature=1e-5))) == {VOCAB_SIZE - 1}
    hot = draw(sampler, logits, params_of(temperature=1e30))
    assert hot == draw(sampler, zeros(256), params_of())
    assert len(set(hot)) > 100


def test_ties_go_to_the_lowest_id_when_greedy(make_sampler):
    logits = zeros(3)
    logits[1, [70, 200]] = 1.0
    logits[2, 299] = 1.0
    sampler = make_sampler(VOCAB_SIZE)
    assert draw(sampler, logits, params_of(temperature=0.0)) == [0, 70, 299]
    assert draw(sampler, logits, params_of(temperature=0.0, presence_penalty=1e-9), prompt=[4]) == [0, 70, 299]
    assert first_argmax(sampler.array(logits)).tolist() == [0, 70, 299]


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.5])
def test_unknown_ids_are_never_drawn(make_sampler, temperature):
    known = np.ones(VOCAB_SIZE, dtype=np.bool_)
    known[[0, 64, 127, 150, 151]] = False
    known[270:] = False
    for mask in (known, np.arange(VOCAB_SIZE) < 270, np.arange(VOCAB_SIZE) < 257):
        logits = np.where(mask, random_logits(256), np.float32(50.0))
        sampler = make_sampler(VOCAB_SIZE, mask)
        drawn = draw(sampler, logits, params_of(temperature=temperature, logit_bias=((64, 9.0),)))
        assert mask[drawn].all()


def test_padding_does_not_change_what_is_drawn(make_sampler):
    """Two paddings of one vocabulary, such as a draft model's and its target's, run the same race."""
    logits = random_logits(128, 200)
    wide = np.pad(logits, ((0, 0), (0, 100)), constant_values=7.0)
    narrow_sampler, wide_sampler = make_sampler(200), make_sampler(VOCAB_SIZE, np.arange(VOCAB_SIZE) < 200)
    for settings in ({}, {"temperature": 0.8, "top_p": 0.9}):
        params = params_of(**settings)
        assert draw(narrow_sampler, logits, params) == draw(wide_sampler, wide, params)


def test_samples_have_streams_of_their_own_and_sample_zero_is_that_of_one(make_sampler):
    logits = zeros(100)
    sampler = make_sampler(VOCAB_SIZE)
    streams = [draw(sampler, logits, params_of(n=4), sample=sample) for sample in range(4)]
    assert streams[0] == draw(sampler, logits, params_of(n=1))
    shifted = [draw(sampler, logits, params_of(seed=5 + i)) for i in range(1, 4)]
    for i, one in enumerate([*streams, *shifted]):
        for other in [*streams, *shifted][:i]:
            assert sum(x == y for x, y in zip(one, other, strict=True)) < 8


def test_the_same_luck_makes_a_similar_drafter_agree(make_sampler):
    """A drafter with perturbed logits agrees more often than independent draws would."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((512, VOCAB_SIZE), dtype=np.float32) * 2
    perturbed = logits + rng.standard_normal(logits.shape, dtype=np.float32) * np.float32(0.3)
    target, drafter = make_sampler(VOCAB_SIZE), make_sampler(VOCAB_SIZE)
    tokens = draw(target, logits, params_of())
    coupled = np.mean(np.asarray(tokens) == draw(drafter, perturbed, params_of()))
    independent = np.mean(np.asarray(tokens) == draw(drafter, perturbed, params_of(seed=4)))
    assert coupled > 0.75
    assert independent < 0.25


@pytest.mark.parametrize(
    "settings",
    [{"temperature": 0.0}, {}, {"top_p": 0.5}, {"top_k": 2}, {"min_p": 0.1}, {"presence_penalty": 1.0}],
    ids=str,
)
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_row_of_nan_is_decided_for_the_first_of_them(make_sampler, settings):
    """NaN must not end a step, since other rows may be valid. An unknown id is banned, whatever its logit."""
    known = np.arange(VOCAB_SIZE) != 0
    logits = random_logits(4)
    logits[1, :] = np.nan
    logits[2, [77, 290]] = np.nan
    logits[3, 299] = np.nan
    fine = draw(make_sampler(VOCAB_SIZE, known), logits[:1], params_of(**settings))
    assert draw(make_sampler(VOCAB_SIZE, known), logits, params_of(**settings)) == [*fine, 1, 77, 299]


def test_logits_that_do_not_fit_are_refused(make_sampler):
    sampler = make_sampler(VOCAB_SIZE)
    state = sampler.start(params_of(), sample=0, prompt_token_ids=[])
    with pytest.raises(InternalError):
        sampler.sample(zeros(2), [SampleRows(state, 0)])
    with pytest.raises(InternalError):
        sampler.sample(zeros(1, VOCAB_SIZE + 1), [SampleRows(state, 0)])


def test_an_empty_step_decides_nothing(make_sampler):
    assert make_sampler(VOCAB_SIZE).sample(zeros(0), []).token_ids == []
