"""All arrival times of a decision in numpy, from Philox4x32-10, without any shortcut."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tests.oracle.elementary import logarithm

Words = npt.NDArray[np.uint64]  # each element holds one 32-bit word
Floats = npt.NDArray[np.float32]

_LOW_WORD = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_KEY_STEPS = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)


class RaceKey(NamedTuple):
    """Everything that decides the arrival times of one decision."""

    seed: int  # uint64
    sample: int
    position: int


def philox4x32(counter: tuple[npt.ArrayLike, ...], seed: int) -> tuple[Words, Words, Words, Words]:
    """Returns four words for each counter. The four parts of a counter are broadcast together."""
    c0, c1, c2, c3 = (np.asarray(word, dtype=np.uint64) for word in counter)
    k0, k1 = np.uint64(seed & 0xFFFFFFFF), np.uint64(seed >> 32)
    for _ in range(10):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (second >> _HALF) ^ c1 ^ k0, second & _LOW_WORD, (first >> _HALF) ^ c3 ^ k1, first & _LOW_WORD
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW_WORD, (k1 + _KEY_STEPS[1]) & _LOW_WORD
    return c0, c1, c2, c3


def exponential(words: Words) -> Floats:
    """Returns E(w) = -log1p(-min((w + 1/2) / 2^32, 1 - 2^-24)) in float32."""
    uniform = (words.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    uniform = np.minimum(uniform, np.float32(1.0 - 2.0**-24))
    rounded = np.float32(1.0) - uniform
    return -logarithm(rounded, (np.float32(1.0) - rounded) - uniform)


def all_arrivals(key: RaceKey, num_ids: int) -> Floats:
    """Returns the arrival times a(v) of all ids: [num_ids] float32."""
    num_blocks = -(-num_ids // 64)
    w0, w1, _, _ = philox4x32((np.arange(num_blocks), key.position, key.sample, 0), key.seed)
    first = exponential(w0) * np.float32(1 / 64)
    words = philox4x32((np.arange(num_blocks * 16), key.position, key.sample, 1), key.seed)
    times = first[:, None] + exponential(np.stack(words, axis=-1)).reshape(num_blocks, 64)
    times[np.arange(num_blocks), (w1 & np.uint64(63)).astype(np.int64)] = first
    return times.reshape(-1)[:num_ids]
