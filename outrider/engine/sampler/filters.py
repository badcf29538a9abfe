"""min_p, top_k and top_p without sorting the vocabulary.

What they keep is a beginning of the tokens' order (see `order`): all keys from a limit on. min_p and
top_k give their limit beforehand. For top_p the winner of the race is checked: it is kept if the mass
before it is below top_p of the whole. If it is not, everything from it on is out as well,
and the race is run again among the tokens before it.

Only the blocks of the largest values are looked into at first. Where that leaves a question open,
the row is asked again with all blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from outrider.engine.sampler.arrivals import BLOCK_SIZE
from outrider.engine.sampler.elementary import masses_of
from outrider.engine.sampler.logit_blocks import LogitBlocks, highest_blocks
from outrider.engine.sampler.order import LOWEST_KEY, lowest_keys, order_keys
from outrider.engine.transfer import upload
from outrider.request import SamplingParams

_NEVER_REACHED = torch.iinfo(torch.int64).max


def has_filters(params: SamplingParams) -> bool:
    """Whether step 6 does anything."""
    return params.min_p > 0.0 or params.top_k > 0 or params.top_p < 1.0


@dataclass(frozen=True, slots=True)
class Filters:
    """Step 6 for some rows, each by its own parameters; m tokens of each are looked into."""

    keys: Tensor  # [num_rows, m] int64
    others: Tensor  # [num_rows, 1] int64: no key of another token is above it
    limits: Tensor  # [num_rows, 1] int64: keys from it on are kept, as far as is known
    is_limit_open: Tensor  # [num_rows, 1] bool: top_k's limit may lie among the other tokens
    top_p: TopP | None  # None: no row has any

    @classmethod
    def of(cls, params: Sequence[SamplingParams], blocks: LogitBlocks, *, num_candidates: int) -> Filters:
        """The limits of min_p and top_k.

        Args:
            params: of each row.
            blocks: values after step 5.
            num_candidates: blocks to look into. If it is all of them, nothing is open, and tokens lie by rising id.
        """
        top_ks = [row.top_k if row.top_k < blocks.num_ids else 0 for row in params]
        if max(top_ks) > num_candidates * BLOCK_SIZE:
            num_candidates = blocks.num_blocks
        candidates, others = highest_blocks(blocks.largest_keys(), num_candidates, nothing=LOWEST_KEY)
        values, token_ids = blocks.look_into(candidates)
        keys = order_keys(values, token_ids)
        largest = blocks.maxima.amax(dim=1, keepdim=True)
        limits = _min_p_limits(params, largest)
        is_limit_open = torch.zeros_like(limits, dtype=torch.bool)
        if any(top_ks):
            limits_of_top_k = _top_k_limits(top_ks, keys)
            is_limit_open = (limits_of_top_k > LOWEST_KEY) & (limits_of_top_k < others)
            limits = torch.maximum(limits, limits_of_top_k)
        top_p = None
        if any(row.top_p < 1.0 for row in params):
            masses = torch.where(keys >= limits, masses_of(values, largest), 0)
            top_p = TopP.of(params, masses, is_whole=limits >= others, is_nan=largest.isnan())
        return cls(keys, others, limits, is_limit_open, top_p)

    def select(self, rows: Tensor) -> Filters:
        """Some of the rows: [n] int64."""
        top_p = None if self.top_p is None else self.top_p.select(rows)
        return Filters(
            self.keys.index_select(0, rows),
            self.others.index_select(0, rows),
            self.limits.index_select(0, rows),
            self.is_limit_open.index_select(0, rows),
            top_p,
        )

    def check(self, winner_keys: Tensor) -> tuple[Tensor, Tensor, Filters]:
        """What top_p says of a token of each row, within its limit: [num_rows, 1] int64, its key.

        Returns:
            Whether it is out, and whether that is open, as it takes tokens that were not looked into: each
            [num_rows, 1] bool. And filters whose limits leave out what is out and all after it.
        """
        if self.top_p is None:
            return torch.zeros_like(self.is_limit_open), self.is_limit_open, self
        mass_before = torch.where(self.keys > winner_keys, self.top_p.masses, 0).sum(dim=1, keepdim=True)
        is_below = mass_before < self.top_p.bounds
        is_out = is_below.logical_not() & self.top_p.is_whole
        stands = is_below & ((winner_keys >= self.others) | self.top_p.is_bounded.logical_not())
        narrowed = replace(self, limits=torch.where(is_out, winner_keys + 1, self.limits))
        return is_out, self.is_limit_open | (is_out | stands).logical_not(), narrowed

    def limits_with_top_p(self) -> Tensor:
        """[num_rows, 1] int64: the key of the last token that all filters keep. For filters of all blocks; sorts."""
        if self.top_p is None:
            return self.limits
        keys, order = self.keys.sort(dim=1, descending=True)
        masses = self.top_p.masses.gather(1, order)
        is_kept = (keys >= self.limits) & (masses.cumsum(dim=1) - masses < self.top_p.bounds)
        last = is_kept.sum(dim=1, keepdim=True) - 1
        return keys.gather(1, last.clamp(min=0))  # clamped for rows of NaN


@dataclass(frozen=True, slots=True)
class TopP:
    """What top_p needs of the tokens that are looked into."""

    masses: Tensor  # [num_rows, m] int64; 0 of what min_p and top_k leave out
    is_whole: Tensor  # [num_rows, 1] bool: other tokens have no mass
    is_bounded: Tensor  # [num_rows, 1] bool: the row has top_p
    bounds: Tensor  # [num_rows, 1] int64: top_p of the whole mass, or less where others have some

    @classmethod
    def of(cls, params: Sequence[SamplingParams], masses: Tensor, *, is_whole: Tensor, is_nan: Tensor) -> TopP:
        """Of each row's parameters. A row with NaN is not bounded: the race takes the first of them."""
        shares = _column([row.top_p for row in params], np.float64, masses.device)
        total = masses.sum(dim=1, keepdim=True)
        # The ceiling keeps comparisons among integers. The first token, with no mass before it, always stays.
        bounds = (shares * total.to(torch.float64)).ceil().to(torch.int64).clamp(min=1)
        is_bounded = (shares < 1.0) & is_nan.logical_not()
        return cls(masses, is_whole, is_bounded, torch.where(is_bounded, bounds, _NEVER_REACHED))

    def select(self, rows: Tensor) -> TopP:
        """Some of the rows: [n] int64."""
        return TopP(
            self.masses.index_select(0, rows),
            self.is_whole.index_select(0, rows),
            self.is_bounded.index_select(0, rows),
            self.bounds.index_select(0, rows),
        )


def _min_p_limits(params: Sequence[SamplingParams], largest: Tensor) -> Tensor:
    """[num_rows, 1] int64. p >= min_p * p_max, as values: v >= v_max + log(min_p)."""
    if all(row.min_p == 0.0 for row in params):
        return torch.full_like(largest, LOWEST_KEY, dtype=torch.int64)
    logs = [math.log(row.min_p) if row.min_p > 0.0 else -math.inf for row in params]
    distances = _column(logs, np.float32, largest.device)
    return torch.where(distances > -torch.inf, lowest_keys(largest + distances), LOWEST_KEY)


def _top_k_limits(top_ks: Sequence[int], keys: Tensor) -> Tensor:
    """[num_rows, 1] int64: the key of the last token that each top_k keeps; 0 keeps all."""
    numbers = _column(top_ks, np.int64, keys.device)
    first = keys.topk(max(top_ks), dim=1).values  # sorted
    return torch.where(numbers > 0, first.gather(1, (numbers - 1).clamp(min=0)), LOWEST_KEY)


def _column(values: Sequence[float], dtype: type[np.generic], device: torch.device) -> Tensor:
    """[len(values), 1]."""
    return upload(np.asarray(values, dtype=dtype)[:, None], device)
