"""Which tokens of a blended prompt are reused and which are computed. Pure functions of values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from outrider.request import Blend

Floats = npt.NDArray[np.float64]


@dataclass(slots=True, eq=False)
class BlendPlan:
    """The pieces of one prompt whose KV is reused, and the tokens that are computed all the same.

    The first piece is a prefix, hence exact. Of the others, whole blocks are reused, counted from the piece's start,
    because the prefix cache has whole blocks only.
    """

    num_exact: int  # number of tokens from the prompt's start on that are computed without reused KV before them
    reused: tuple[range, ...]  # positions of the reused tokens of each piece; none is empty
    share: float  # of the reused tokens, those that are computed all the same
    computed: npt.NDArray[np.bool_] | None = field(default=None)  # [num_tokens], by position; None: not chosen yet

    @classmethod
    def of(cls, blend: Blend | None, num_tokens: int, block_size: int) -> BlendPlan | None:
        """Returns the plan for a prompt of `num_tokens` tokens; None if nothing would be reused."""
        reused, start = [], 0
        for length in () if blend is None else blend.piece_lengths:
            end = min(start + length, num_tokens)
            num_whole = (end - start) // block_size * block_size
            if start and num_whole > 0:
                reused.append(range(start, start + num_whole))
            start = end
        return cls(reused[0].start, tuple(reused), blend.recompute_share) if blend and reused else None

    @property
    def num_reused(self) -> int:
        """The number of tokens whose KV is taken from pieces, before some of them are computed again."""
        return sum(map(len, self.reused))

    @property
    def num_recomputed(self) -> int:
        """The number of these tokens that are computed again."""
        return round(self.share * self.num_reused)

    def choose(self, deviations: Sequence[Floats], num_tokens: int) -> None:
        """Chooses the tokens to compute: all that are not reused, and those of the largest deviations, the earlier of
        equal ones. `deviations`: of each piece's reused tokens.
        """
        places = np.concatenate(self.reused)
        order = np.argsort(-np.concatenate(deviations), kind="stable")
        self.computed = np.ones(num_tokens, dtype=np.bool_)
        self.computed[places] = False
        self.computed[places[order[: self.num_recomputed]]] = True

    def runs(self, start: int, end: int) -> Iterator[range]:
        """Yields the computed tokens in [start, end) as ranges of consecutive positions."""
        assert self.computed is not None
        edges = np.flatnonzero(np.diff(self.computed[start:end], prepend=False, append=False)) + start
        for first, last in edges.reshape(-1, 2).tolist():
            yield range(first, last)
