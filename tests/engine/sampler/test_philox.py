from __future__ import annotations

import numpy as np
import pytest

from outrider.engine.sampler.philox import philox4x32, split_seed

ALL_ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ALL_ONES,) * 4, (ALL_ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers_of_random123(array, counter, key, words):
    assert philox4x32(counter, key) == words
    counters, keys = ([array(np.asarray([word])) for word in each] for each in (counter, key))
    assert tuple(int(word[0]) for word in philox4x32(counters, keys)) == words


def test_seed_splits_into_low_and_high_word():
    assert split_seed(0x0123456789ABCDEF) == (0x89ABCDEF, 0x01234567)
    assert split_seed(2**64 - 1) == (ALL_ONES, ALL_ONES)
