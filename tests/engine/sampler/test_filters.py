from __future__ import annotations

import numpy as np
import pytest

from outrider.engine.arrays import largest_keys
from outrider.engine.sampler.filters import limits_of
from outrider.engine.sampler.order import ids_of_keys, lowest_keys, order_keys, values_of_keys
from tests.engine.sampler.reference import params_of, reference_distribution

SETTINGS = [
    {},
    {"top_p": 0.95, "temperature": 0.7},
    {"top_p": 0.5},
    {"top_p": 1e-6},
    {"top_p": 0.999999},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 63, "top_p": 0.9},
    {"top_k": 5, "top_p": 0.3},
    {"top_k": 10_000},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"min_p": 0.02, "top_k": 20, "top_p": 0.8, "temperature": 1.7},
    {"min_p": 1e-30, "top_p": 0.7},
    {"min_p": 0.3, "top_k": 3, "temperature": 0.2},
]


def random_logits(kind, num_rows, vocab_size):
    rng = np.random.default_rng(17)
    noise = rng.standard_normal((num_rows, vocab_size)) * 2
    if kind == "ties":
        noise = np.round(noise)
    if kind == "flat":
        noise = noise * 0
    if kind == "flat top":
        noise = np.minimum(noise, 1.0)
    if kind == "banned":
        noise = np.where(noise > 1, -np.inf, noise)
    return noise.astype(np.float32)


KINDS = ["random", "ties", "flat", "flat top", "banned"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_kept_tokens_are_those_of_the_sorted_float64_reference(array, kind, settings):
    params = params_of(**settings)
    for vocab_size in (5, 150, 448):
        logits = random_logits(kind, 3, vocab_size)
        values = array(logits / np.float32(params.temperature))
        keys = order_keys(values)
        is_kept = np.asarray(keys >= limits_of([params] * 3, values, keys))
        for row in range(3):
            expected = np.flatnonzero(reference_distribution(logits[row], params) > -np.inf)
            assert np.flatnonzero(is_kept[row] & (logits[row] > -np.inf)).tolist() == expected.tolist()


def test_keys_sort_as_values_do_and_equals_by_rising_id(array):
    rng = np.random.default_rng(0)
    values = np.round(rng.standard_normal(1000) * 3).astype(np.float32)
    values[:8] = [0.0, -0.0, np.inf, -np.inf, 1e-45, -1e-45, 3e38, -3e38]
    keys = order_keys(array(values[None]))
    order = np.argsort(-values, kind="stable")
    assert np.argsort(-np.asarray(keys[0])).tolist() == order.tolist()
    assert ids_of_keys(keys)[0].tolist() == list(range(1000))
    assert values_of_keys(keys)[0].tolist() == values.tolist()
    lowest = np.asarray(lowest_keys(array(values)))
    assert np.array_equal(np.asarray(keys[0])[:, None] >= lowest[None], values[:, None] >= values[None])
    for number in (0, 1, 7, 999, 1000):
        assert ids_of_keys(largest_keys(keys, number))[0].tolist() == order[:number].tolist()
