from __future__ import annotations

import numpy as np
import pytest

from outrider.engine.sampler import SampleRows
from outrider.engine.sampler.edits import LogitEditor, Vocabulary
from outrider.engine.sampler.penalties import PenaltyState
from outrider.engine.sampler.sequence_sampling import Decision, SequenceSampling
from tests.engine.sampler.reference import params_of
from tests.oracle.sampler import OracleSampler

VOCAB_SIZE = 100


@pytest.fixture
def edited(array):
    """Returns a function that edits a row with the tested library."""

    def edit(params, logits, penalties, assumed=()):
        editor = LogitEditor(Vocabulary.of(np.ones(len(logits), dtype=np.bool_)))
        sampling = SequenceSampling(params=params, sample=0, logprobs=None, penalties=penalties)
        row = array(np.asarray([logits], dtype=np.float32))
        return editor.edit(row, [Decision(sampling, 0, tuple(assumed))])[0].tolist()

    return edit


@pytest.fixture
def applied(edited):
    def edit(params, logits, *, prompt=(), generated=(), stops=(), assumed=()):
        state = PenaltyState(
            params, prompt_token_ids=prompt, generated_token_ids=generated, stop_token_ids=stops, vocab_size=len(logits)
        )
        return edited(params, logits, state, assumed)

    return edit


def test_repetition_divides_positive_and_multiplies_negative_logits_of_prompt_and_output(applied):
    logits = [4.0, -4.0, 0.0, 4.0, -4.0]
    params = params_of(repetition_penalty=2.0)
    assert applied(params, logits, prompt=[0, 1, 1], generated=[2]) == [2.0, -8.0, 0.0, 4.0, -4.0]
    assert applied(params_of(repetition_penalty=0.5), logits, prompt=[0, 1]) == [8.0, -2.0, 0.0, 4.0, -4.0]


def test_frequency_counts_and_presence_does_not_and_neither_looks_at_the_prompt(applied):
    logits = [1.0] * 4
    assert applied(params_of(frequency_penalty=0.5), logits, prompt=[0], generated=[1, 1, 2]) == [1.0, 0.0, 0.5, 1.0]
    assert applied(params_of(presence_penalty=0.5), logits, prompt=[0], generated=[1, 1, 2]) == [1.0, 0.5, 0.5, 1.0]
    assert applied(params_of(presence_penalty=-0.5), logits, generated=[3]) == [1.0, 1.0, 1.0, 1.5]


def test_order_is_bias_then_repetition_then_frequency_and_presence(applied):
    params = params_of(logit_bias=((0, 3.0),), repetition_penalty=2.0, frequency_penalty=0.25, presence_penalty=1.0)
    assert applied(params, [1.0, 1.0], generated=[0, 0]) == [(1.0 + 3.0) / 2.0 - 0.25 * 2 - 1.0, 1.0]


def test_bias_does_not_bring_a_banned_token_back(applied):
    params = params_of(logit_bias=((1, 100.0),), min_tokens=2)
    assert applied(params, [0.0, 0.0], stops=[1]) == [0.0, -np.inf]


def test_stop_tokens_are_banned_until_min_tokens_are_generated_drafts_included(applied):
    params = params_of(min_tokens=3)
    for num_generated in range(5):
        for num_assumed in range(5):
            row = applied(params, [0.0] * 4, generated=[0] * num_generated, stops=[2, 3], assumed=[1] * num_assumed)
            is_banned = num_generated + num_assumed < 3
            assert row == ([0.0, 0.0, -np.inf, -np.inf] if is_banned else [0.0] * 4)


def test_ids_beyond_the_vocabulary_are_ignored(applied):
    """A draft model may have fewer padded ids than its target."""
    params = params_of(repetition_penalty=2.0, frequency_penalty=1.0, logit_bias=((7, 1.0),), min_tokens=9)
    row = applied(params, [2.0, 2.0], prompt=[5, 0], generated=[6, 1], stops=[8], assumed=[7, 1])
    assert row == [1.0, 1.0 - 2.0]


def test_committing_is_the_same_as_having_generated(applied, edited):
    params = params_of(repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2)
    rng = np.random.default_rng(4)
    logits = rng.standard_normal(500).astype(np.float32)
    generated = rng.integers(0, 500, size=300).tolist()
    state = PenaltyState(params, prompt_token_ids=range(40), generated_token_ids=(), stop_token_ids=(), vocab_size=500)
    for start in range(0, 300, 7):
        state.commit(generated[start : start + 7])
    assert state.num_generated == 300
    assert edited(params, logits, state) == applied(params, logits, prompt=range(40), generated=generated)


PENALTIES = [
    {"repetition_penalty": 1.7},
    {"frequency_penalty": 1.5, "presence_penalty": 0.8},
    {"presence_penalty": -2.0},
    {"repetition_penalty": 0.6, "frequency_penalty": -0.5, "logit_bias": ((3, 2.0), (50, -100.0))},
    {"min_tokens": 4},
    {"min_tokens": 3, "repetition_penalty": 1.2, "top_p": 0.8, "temperature": 0.6},
    {"temperature": 0.0, "frequency_penalty": 1.0, "min_tokens": 2},
    {"logit_bias": ((99, 4.0),), "top_k": 5},
]


@pytest.mark.parametrize("settings", PENALTIES, ids=str)
def test_rows_with_drafts_decide_as_sequential_steps_do(settings, make_sampler):
    """Row j counts the drafts before it, so decisions equal those made token by token, whatever the drafts are."""
    rng = np.random.default_rng(8)
    logits = (rng.standard_normal((8, VOCAB_SIZE)) * 2).astype(np.float32)
    logits[:, [1, 2]] += 3  # makes stop tokens likely
    prompt, generated, drafts = [5, 6, 6, 50], [7, 8], tuple(rng.integers(0, VOCAB_SIZE, size=7).tolist())
    params, stops = params_of(**settings), [1, 2]
    sampler = make_sampler(VOCAB_SIZE)

    def start(sampler=sampler):
        return sampler.start(
            params, sample=1, prompt_token_ids=prompt, generated_token_ids=generated, stop_token_ids=stops
        )

    verified = sampler.sample(logits, [SampleRows(start(), 6, drafts)]).token_ids

    sequential, assumed = [], []
    state, assuming = start(), start()
    for j in range(8):
        row = logits[j : j + 1]
        sequential += sampler.sample(row, [SampleRows(state, 6 + j)]).token_ids
        assumed += sampler.sample(row, [SampleRows(assuming, 6 + j, (), drafts[:j])]).token_ids
        sampler.commit(state, drafts[j : j + 1])
    oracle = OracleSampler(vocab_size=VOCAB_SIZE, known_token_ids=np.ones(VOCAB_SIZE, dtype=np.bool_))
    expected = oracle.sample(logits, [SampleRows(start(oracle), 6, drafts)]).token_ids
    assert verified == sequential == assumed == expected


def test_ignoring_drafts_is_noticed(make_sampler):
    """Negative control: a row that did not count the drafts before it would have another token."""
    logits = np.zeros((8, VOCAB_SIZE), dtype=np.float32)
    logits[:, 7] = 9.0
    params = params_of(temperature=0.0, frequency_penalty=2.0, presence_penalty=2.0)
    sampler = make_sampler(VOCAB_SIZE)
    state = sampler.start(params, sample=0, prompt_token_ids=[])
    with_drafts = sampler.sample(logits, [SampleRows(state, 0, (7,) * 7)]).token_ids
    without = [sampler.sample(logits[:1], [SampleRows(state, j)]).token_ids[0] for j in range(8)]
    assert with_drafts == [7, 7, 7, 7, 0, 0, 0, 0]
    assert without == [7] * 8
