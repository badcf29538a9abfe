"""min_p, top_k and top_p without sorting the vocabulary.

Tokens are ordered by falling value and among equals by rising id; what the filters keep is
always a beginning of that order, and a `Limit` names its last token. min_p and top_k give
their limit beforehand. For top_p the winner of the race is checked: it is kept if the mass
before it is below top_p of the whole. If it is not, everything from it on is out as well,
and the race is run again among the tokens before it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from outrider.engine.sampler.arrivals import BLOCK_SIZE
from outrider.engine.sampler.elementary import masses_of
from outrider.engine.sampler.logit_blocks import LogitBlocks
from outrider.request import SamplingParams

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

_CHUNK = 512  # blocks whose masses are added up together: what the processor's cache holds
_FLAT_SHARE = 4  # a row where more than a fourth of the blocks count is taken whole

_ANY_ID = np.iinfo(np.int64).max


class Limit(NamedTuple):
    """The last token that is kept: those of a greater value are, and of equals those up to `last_id`."""

    value: float  # float32
    last_id: int


NO_LIMIT = Limit(-math.inf, _ANY_ID)


def has_filters(params: SamplingParams) -> bool:
    """Whether step 6 does anything."""
    return params.min_p > 0.0 or params.top_k > 0 or params.top_p < 1.0


def earlier(one: Limit, other: Limit) -> Limit:
    """The limit that keeps less."""
    return min(one, other, key=lambda limit: (-limit.value, limit.last_id))


def first_in_order(blocks: LogitBlocks, row: int, count: int) -> tuple[Ints, Floats]:
    """The first `count` tokens of the order and their values: [n] int64, [n] float32, n = min(count, num_ids)."""
    count = min(count, blocks.num_ids)
    if count == 0:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32)
    if count < blocks.num_blocks:
        # `count` blocks have a maximum of at least this, so as many tokens do.
        maxima = blocks.maxima[row]
        lowest = float(np.partition(maxima, len(maxima) - count)[len(maxima) - count])
    else:
        values = blocks.whole_row(row)
        lowest = float(np.partition(values, len(values) - count)[len(values) - count])
    token_ids, values = kept_by(blocks, row, Limit(lowest, _ANY_ID))
    order = np.argsort(-values, kind="stable")[:count]  # ids rise already: stable keeps equals in order
    return token_ids[order], values[order]


def kept_by(blocks: LogitBlocks, row: int, limit: Limit) -> tuple[Ints, Floats]:
    """Tokens up to the limit, by rising id, and their values: [n] int64, [n] float32."""
    (indices,) = np.nonzero(blocks.maxima[row] >= np.float32(limit.value))
    values = blocks.blocks(np.full(len(indices), row, dtype=np.int64), indices)
    token_ids = indices[:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE, dtype=np.int64)
    value = np.float32(limit.value)
    is_kept = (values > value) | ((values == value) & (token_ids <= limit.last_id))
    is_kept &= token_ids < blocks.num_ids
    return token_ids[is_kept], values[is_kept]


class Filters:
    """Step 6 for the rows of a batch, each by its own parameters."""

    def __init__(self, params: Sequence[SamplingParams], blocks: LogitBlocks) -> None:
        """Args:
        params: of each row.
        blocks: the values of each row, after step 5.
        """
        self._blocks = blocks
        self._largest: Floats = blocks.maxima.max(axis=1)  # [num_rows] float32
        self._top_ps = [row.top_p for row in params]
        self._totals: dict[int, float] = {}
        self.limits = [self._first_limit(row, i) for i, row in enumerate(params)]  # by min_p and top_k

    def _first_limit(self, params: SamplingParams, row: int) -> Limit:
        limit = NO_LIMIT
        if np.isnan(self._largest[row]):  # the race takes the first NaN
            return limit
        if params.min_p > 0.0:
            # p >= min_p * p_max, as values: v >= v_max + log(min_p).
            limit = Limit(float(self._largest[row] + np.float32(math.log(params.min_p))), _ANY_ID)
        if 0 < params.top_k < self._blocks.num_ids:
            token_ids, values = first_in_order(self._blocks, row, params.top_k)
            limit = earlier(limit, Limit(float(values[-1]), int(token_ids[-1])))
        return limit

    def outside(self, rows: Sequence[int], token_ids: Sequence[int]) -> dict[int, Limit]:
        """Those of `rows` whose token is outside top_p, with the limit that leaves out it and all after it.

        Args:
            rows: to check, by index.
            token_ids: one for each of `rows`, within its limit.
        """
        checked = [(row, token_id) for row, token_id in zip(rows, token_ids, strict=True) if self._top_ps[row] < 1.0]
        if not checked:
            return {}
        indices, ids = np.asarray(checked, dtype=np.int64).T
        values = self._blocks.select(indices).tokens(ids[:, None])[:, 0]
        masses = self._masses_before(indices, ids, values).tolist()
        least_totals = self._least_totals(indices)
        return {
            row: Limit(float(value), token_id - 1)
            for (row, token_id), value, mass, least in zip(checked, values, masses, least_totals, strict=True)
            if mass > 0 and mass >= self._top_ps[row] * least and mass >= self._top_ps[row] * self._total(row)
        }

    def kept(self, row: int) -> tuple[Ints, Floats]:
        """All tokens of a row that may be drawn, in order, and their values: [n] int64, [n] float32. Sorts."""
        token_ids, values = kept_by(self._blocks, row, self.limits[row])
        order = np.argsort(-values, kind="stable")
        token_ids, values = token_ids[order], values[order]
        if self._top_ps[row] < 1.0:
            weights = masses_of(values, self._largest[row])
            mass_before = np.cumsum(weights) - weights
            # The ceiling keeps the comparison among integers, exactly as in `outside`.
            num_kept = int(np.searchsorted(mass_before, math.ceil(self._top_ps[row] * self._total(row))))
            token_ids, values = token_ids[: max(1, num_kept)], values[: max(1, num_kept)]
        return token_ids, values

    def _masses_before(self, rows: Ints, token_ids: Ints, values: Floats) -> Ints:
        """Mass of what comes before each token in its row's order: [num_checked] int64."""
        holds_some = self._blocks.maxima[rows] >= values[:, None]  # [num_checked, num_blocks]
        before = np.zeros(len(rows), dtype=np.int64)
        for i in np.flatnonzero(holds_some.sum(axis=1) > self._blocks.num_blocks // _FLAT_SHARE).tolist():
            before[i] = self._mass_before_in_whole(int(rows[i]), int(token_ids[i]), values[i])
            holds_some[i] = False
        owners, indices = np.nonzero(holds_some)
        for start in range(0, len(owners), _CHUNK):
            part = slice(start, start + _CHUNK)
            self._add_masses_before(before, rows, (token_ids, values), (owners[part], indices[part]))
        return before

    def _mass_before_in_whole(self, row: int, token_id: int, value: np.float32) -> int:
        """The same for one token of a flat row: most of the row counts, so blocks would save nothing."""
        values = self._blocks.whole_row(row)
        masses = masses_of(values, self._largest[row])
        if self.limits[row] == NO_LIMIT:
            self._totals[row] = float(masses.sum())
        num_equal = int(np.count_nonzero(values[:token_id] == value))
        return int((masses * (values > value)).sum()) + num_equal * int(masses[token_id])

    def _add_masses_before(
        self, before: Ints, rows: Ints, tokens: tuple[Ints, Floats], pairs: tuple[Ints, Ints]
    ) -> None:
        """Adds to `before` [num_checked] what some blocks hold; blocks come as (index into `rows`, block index)."""
        owners, indices = pairs
        token_ids, values = tokens
        found = self._blocks.blocks(rows[owners], indices)  # [n, 64]
        own_values = values[owners][:, None]
        masses = masses_of(found, self._largest[rows[owners]][:, None])
        np.add.at(before, owners, (masses * (found > own_values)).sum(axis=1))
        equal_pairs, offsets = np.nonzero(found == own_values)
        is_before = indices[equal_pairs] * BLOCK_SIZE + offsets < token_ids[owners[equal_pairs]]
        equal_pairs, offsets = equal_pairs[is_before], offsets[is_before]
        np.add.at(before, owners[equal_pairs], masses[equal_pairs, offsets])

    def _least_totals(self, rows: Ints) -> list[float]:
        """A cheap lower bound of each `_total`, enough to keep most winners: the blocks' largest masses alone."""
        totals = masses_of(self._blocks.maxima[rows], self._largest[rows][:, None]).sum(axis=1)
        return [
            float(total) if self.limits[row] == NO_LIMIT else 0.0
            for row, total in zip(rows.tolist(), totals, strict=True)
        ]

    def _total(self, row: int) -> float:
        """Mass of what min_p and top_k keep."""
        if row not in self._totals:
            if self.limits[row] == NO_LIMIT:
                values = self._blocks.whole_row(row)
            else:
                _, values = kept_by(self._blocks, row, self.limits[row])
            self._totals[row] = float(masses_of(values, self._largest[row]).sum())
        return self._totals[row]
