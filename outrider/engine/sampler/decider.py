"""Who decides rows of logits: the native kernels where they are loaded, else numpy or torch where the logits are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from outrider.engine.arrays import Array
from outrider.engine.sampler.penalties import PenaltyState
from outrider.engine.sampler.sequence_sampling import SampleRows
from outrider.request import SamplingParams

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Which ids can be drawn: those below `num_ids` but for the holes. What lies behind is padding."""

    size: int  # width of the logits
    num_ids: int  # 1 to size
    holes: Ints  # [n] int64, rising, below num_ids

    @classmethod
    def of(cls, known: npt.NDArray[np.bool_]) -> Vocabulary:
        """Of a mask [size] bool with at least one known id."""
        assert known.any(), "no known token"
        num_ids = int(np.flatnonzero(known)[-1]) + 1
        return cls(len(known), num_ids, np.flatnonzero(~known[:num_ids]))


class Decider(Protocol):
    """Steps 1 to 7 of the contract's SamplingParams, for all rows of a step at once.

    Implementations decide alike, to the last id: they are made of the same float32
    operations in the same order. A row with NaN is decided for the first of them, one
    where nothing is left for id 0. Not thread-safe.
    """

    def prepare(self, params: SamplingParams, *, sample: int, penalties: PenaltyState) -> object:
        """What is kept for one sample; it comes back as `state.prepared` of its rows."""

    def decide(self, logits: Array, rows: Sequence[SampleRows]) -> Array:
        """A token for each row: [num_rows] int64, where the logits are. Does not wait for a GPU.

        Args:
            logits: [num_rows, vocab_size] float32, not changed; at least one row.
            rows: whose they are, in order.
        """
