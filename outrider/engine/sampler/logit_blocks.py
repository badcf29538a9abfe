"""Rows of values cut in blocks of 64 ids, so that most of a vocabulary need not be looked into."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from outrider.engine.sampler.arrivals import BLOCK_SIZE
from outrider.engine.sampler.order import order_keys


@dataclass(frozen=True, slots=True)
class LogitBlocks:
    """Values of some rows; ids that there are not are -inf."""

    values: Tensor  # [num_rows, num_blocks, 64] float32
    maxima: Tensor  # [num_rows, num_blocks] float32
    num_ids: int

    @classmethod
    def of(cls, values: Tensor) -> LogitBlocks:
        """Cuts [num_rows, num_ids] float32."""
        num_rows, num_ids = values.shape
        missing = -num_ids % BLOCK_SIZE
        if missing:
            values = pad(values, (0, missing), value=-torch.inf)
        blocks = values.reshape(num_rows, -1, BLOCK_SIZE)
        return cls(blocks, blocks.amax(dim=2), num_ids)

    @property
    def num_blocks(self) -> int:
        return self.maxima.shape[1]

    def select(self, rows: Tensor) -> LogitBlocks:
        """Some of the rows: [n] int64."""
        return LogitBlocks(self.values.index_select(0, rows), self.maxima.index_select(0, rows), self.num_ids)

    def largest_keys(self) -> Tensor:
        """Order keys (see `order`) that no token of a block is above: [num_rows, num_blocks] int64."""
        first_ids = torch.arange(self.num_blocks, device=self.maxima.device) * BLOCK_SIZE
        return order_keys(self.maxima, first_ids)

    def token_values(self, token_ids: Tensor) -> Tensor:
        """The value of a token of each row: [num_rows] int64 -> [num_rows] float32."""
        return self.values.flatten(1).gather(1, token_ids.unsqueeze(1)).squeeze(1)

    def look_into(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Values and ids of the tokens of some blocks of each row.

        [num_rows, n] int64 -> [num_rows, n * 64] float32, [num_rows, n * 64] int64.
        """
        values = self.values.gather(1, blocks.unsqueeze(2).expand(-1, -1, BLOCK_SIZE))
        ids = blocks.unsqueeze(2) * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device=blocks.device)
        return values.flatten(1), ids.flatten(1)


def highest_blocks(bounds: Tensor, num_candidates: int, *, nothing: float) -> tuple[Tensor, Tensor]:
    """The blocks of the highest bounds, and the highest bound of the others.

    Args:
        bounds: [num_rows, num_blocks].
        num_candidates: how many blocks; all of them stay in order.
        nothing: the bound of no blocks.

    Returns:
        [num_rows, n] int64 and [num_rows, 1] of the bounds' dtype.
    """
    num_rows, num_blocks = bounds.shape
    if num_candidates >= num_blocks:
        every_block = torch.arange(num_blocks, device=bounds.device).expand(num_rows, -1)
        return every_block, bounds.new_full((num_rows, 1), nothing)
    highest, blocks = bounds.topk(num_candidates + 1, dim=1)  # sorted; which of equals is left out does not matter
    return blocks.narrow(1, 0, num_candidates), highest.narrow(1, num_candidates, 1)
