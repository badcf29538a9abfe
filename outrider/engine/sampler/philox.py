"""Philox4x32-10, the counter-based generator behind every random decision.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC'11); checked against the
known-answer vectors of Random123.
"""

from __future__ import annotations

from typing import TypeVar

from outrider.engine.arrays import Array

Word = TypeVar("Word", int, Array)

WORD = 0xFFFFFFFF
"""Mask of the 32 bits of a word."""

_NUM_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def split_seed(seed: int) -> tuple[int, int]:
    """Returns the key for a uint64 seed: its low and its high 32 bits."""
    return seed & WORD, (seed >> 32) & WORD


def philox4x32(counter: tuple[Word, Word, Word, Word], key: tuple[Word, Word]) -> tuple[Word, Word, Word, Word]:
    """Returns four random words for each counter.

    Args:
        counter: four words c0..c3, each below 2^32: Python's integers, or int64 arrays that broadcast together.
        key: two words of the same kind.

    Returns:
        Words w0..w3 of that kind; arrays have the broadcast shape of `counter` and `key`. They are computed with
        integers only, so they are the same everywhere.
    """
    # A word is the low half of an int64, so that one multiplication gives both halves of a product. The high half of a
    # word may hold other bits until the end: xor does not move them down, and they are masked before a multiplication.
    # A product above 2^63 wraps, which does not affect its bits.
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        first = (c0 & WORD) * _MULTIPLIERS[0]
        second = (c2 & WORD) * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (second >> 32) ^ c1 ^ k0, second, (first >> 32) ^ c3 ^ k1, first
        k0, k1 = k0 + _KEY_STEPS[0], k1 + _KEY_STEPS[1]
    return c0 & WORD, c1 & WORD, c2 & WORD, c3 & WORD
