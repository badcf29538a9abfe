"""Philox4x32-10, the counter-based generator behind every random decision.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC'11);
checked against the known-answer vectors of Random123.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]  # each element holds one 32-bit word

_NUM_ROUNDS = 10
_MULTIPLIERS = np.asarray([0xD2511F53, 0xCD9E8D57], dtype=np.uint64)
_KEY_STEPS = np.asarray([0x9E3779B9, 0xBB67AE85], dtype=np.uint64) * np.arange(_NUM_ROUNDS, dtype=np.uint64)[:, None]
_HALF = np.uint64(32)
_LOW_WORD = np.uint64(0xFFFFFFFF)


def split_seed(seed: int) -> tuple[int, int]:
    """The key of a uint64 seed: its low and its high 32 bits."""
    return seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF


def philox4x32(
    counter: tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike, npt.ArrayLike],
    key: tuple[npt.ArrayLike, npt.ArrayLike],
) -> tuple[Words, Words, Words, Words]:
    """Four random words for each counter.

    Args:
        counter: four words c0..c3, integers or uint64 arrays that broadcast together, each below 2^32.
        key: two words of the same kind.

    Returns:
        Words w0..w3 in the broadcast shape of `counter` and `key`. Integers only, so the same on every machine.
    """
    # 32-bit words live in 64-bit lanes: one multiplication then gives both halves of the
    # product. Both halves of a round are done by one call each: at the usual sizes, some
    # hundred counters, the time goes to the calls.
    c0, c1, c2, c3 = (np.asarray(word, dtype=np.uint64) for word in counter)
    k0, k1 = (np.asarray(word, dtype=np.uint64) for word in key)
    shape = np.broadcast(c0, c1, c2, c3, k0, k1).shape
    ones = (1,) * len(shape)
    key_shape = np.broadcast(k0, k1).shape
    round_keys = np.empty((_NUM_ROUNDS, 2, *ones[len(key_shape) :], *key_shape), dtype=np.uint64)
    round_keys[:, 0], round_keys[:, 1] = k0, k1
    round_keys += _KEY_STEPS.reshape(_NUM_ROUNDS, 2, *ones)
    round_keys &= _LOW_WORD
    multipliers = _MULTIPLIERS.reshape(2, *ones)
    multiplied = np.empty((2, *shape), dtype=np.uint64)  # c0 and c2
    carried = np.empty((2, *shape), dtype=np.uint64)  # c1 and c3
    multiplied[0], carried[0], multiplied[1], carried[1] = c0, c1, c2, c3
    product, low = np.empty_like(multiplied), np.empty_like(multiplied)
    for round_key in round_keys:
        np.multiply(multiplied, multipliers, out=product)
        np.bitwise_and(product, _LOW_WORD, out=low)
        np.right_shift(product, _HALF, out=product)
        np.bitwise_xor(product[::-1], carried, out=multiplied)
        np.bitwise_xor(multiplied, round_key, out=multiplied)
        carried, low = low[::-1], carried[::-1]
    return multiplied[0], carried[0], multiplied[1], carried[1]
