"""How the KV heads of a model are shared among ranks. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


def split_heads(num_heads: int, num_ranks: int) -> tuple[range, ...]:
    """Of each rank, in order and of equal length: as transformers splits the rows of a projection.

    Raises ValueError where they do not divide.
    """
    if num_heads % num_ranks:
        raise ValueError(f"{num_heads} heads among {num_ranks} ranks")
    size = num_heads // num_ranks
    return tuple(range(first, first + size) for first in range(0, num_heads, size))


@dataclass(frozen=True, slots=True)
class HeadShare:
    """What one rank holds of a range of heads."""

    rank: int
    local: range  # as indices of the rank's own heads
    place: range  # within the range that was asked for


def shares_of(heads: range, ranges: Sequence[range]) -> Iterator[HeadShare]:
    """The parts of `heads` that each rank holds, in the order of heads; `ranges` are those of all ranks."""
    for rank, held in enumerate(ranges):
        start, end = max(heads.start, held.start), min(heads.stop, held.stop)
        if start < end:
            yield HeadShare(
                rank,
                local=range(start - held.start, end - held.start),
                place=range(start - heads.start, end - heads.start),
            )
