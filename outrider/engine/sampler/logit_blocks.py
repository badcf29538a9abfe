"""Rows of logits, cut in blocks of 64 ids with the maximum of each."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from outrider.engine.sampler.arrivals import BLOCK_SIZE

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

_MINUS_INFINITY = np.float32(-np.inf)


@dataclass(frozen=True, slots=True)
class LogitBlocks:
    """A view of some rows of logits for blockwise work; ids from `num_ids` on count as -inf.

    Values are divided by their row's temperature wherever they come out, so that everything
    downstream sees the distribution after step 5 of the contract. Each value depends on
    its own logit and temperature alone.
    """

    num_ids: int
    maxima: Floats  # [num_rows, num_blocks] float32, each block's largest value
    _logits: Floats  # [num_logits, vocab] float32; some of its rows are those of this view
    _rows: Ints  # [num_rows] int64, index into `_logits`
    _tail: Floats  # [num_logits, 64] float32: the last block filled up with -inf, unless it is whole
    _temperatures: Floats  # [num_rows] float32
    _divides: bool  # False: all temperatures are 1

    @classmethod
    def of(cls, logits: Floats, rows: Ints, temperatures: Floats, *, num_ids: int) -> LogitBlocks:
        """Cuts `logits[rows]`.

        Args:
            logits: [num_logits, vocab] float32, not changed, contiguous.
            rows: [num_rows] int64, rising.
            temperatures: [num_rows] float32, above 0.
            num_ids: ids below it take part; 1 to vocab.
        """
        num_whole = num_ids // BLOCK_SIZE
        whole = _whole_blocks(logits, num_whole)
        # torch: numpy's maximum over an axis of 64 costs five times as much.
        maxima = torch.from_numpy(whole if len(rows) == len(logits) else whole[rows]).amax(dim=2).numpy()
        tail = np.empty((0, BLOCK_SIZE), dtype=np.float32)
        if num_whole * BLOCK_SIZE < num_ids:
            tail = np.full((len(logits), BLOCK_SIZE), _MINUS_INFINITY)
            rest = logits[:, num_whole * BLOCK_SIZE : num_ids]
            tail[:, : rest.shape[1]] = rest
            maxima = np.concatenate([maxima, tail[rows].max(axis=1, keepdims=True)], axis=1)
        divides = bool((temperatures != 1.0).any())
        if divides:  # rounded division is monotone: the maximum of quotients is the quotient of the maximum
            maxima = maxima / temperatures[:, None]
        return cls(num_ids, maxima, logits, rows, tail, temperatures, divides)

    @property
    def num_rows(self) -> int:
        return len(self.maxima)

    @property
    def num_blocks(self) -> int:
        return self.maxima.shape[1]

    def select(self, rows: Ints) -> LogitBlocks:
        """Some of the rows."""
        return replace(self, maxima=self.maxima[rows], _rows=self._rows[rows], _temperatures=self._temperatures[rows])

    def whole_row(self, row: int) -> Floats:
        """All values of a row: [num_ids] float32, to be read only."""
        values = self._logits[self._rows[row], : self.num_ids]
        return values / self._temperatures[row] if self._divides else values

    def value(self, row: int, token_id: int) -> np.float32:
        """One value, of an id below `num_ids`."""
        return np.float32(self._logits[self._rows[row], token_id] / self._temperatures[row])

    def blocks(self, rows: Ints, blocks: Ints) -> Floats:
        """Values of n blocks, each named by its row and its index: [n, 64] float32."""
        num_whole = self.num_ids // BLOCK_SIZE
        whole = _whole_blocks(self._logits, num_whole)
        logit_rows = self._rows[rows]
        if num_whole == self.num_blocks:
            values = whole[logit_rows, blocks]
        else:
            is_tail = blocks == num_whole
            values = np.empty((len(rows), BLOCK_SIZE), dtype=np.float32)
            values[~is_tail] = whole[logit_rows[~is_tail], blocks[~is_tail]]
            values[is_tail] = self._tail[logit_rows[is_tail]]
        if self._divides:
            values /= self._temperatures[rows][:, None]
        return values

    def tokens(self, token_ids: Ints) -> Floats:
        """Values of as many tokens in each row: [num_rows, n] int64 -> [num_rows, n] float32."""
        places = (self._rows * self._logits.shape[1])[:, None] + np.minimum(token_ids, self.num_ids - 1)
        values = self._logits.reshape(-1).take(places)
        if self._divides:
            values /= self._temperatures[:, None]
        if self.num_ids % BLOCK_SIZE:
            values[token_ids >= self.num_ids] = _MINUS_INFINITY
        return values


def _whole_blocks(logits: Floats, num_whole: int) -> Floats:
    """[num_logits, num_whole, 64] float32, a view."""
    return logits[:, : num_whole * BLOCK_SIZE].reshape(len(logits), num_whole, BLOCK_SIZE)
