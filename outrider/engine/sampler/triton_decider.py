"""Decides tokens with our Triton kernels: a few launches for all rows of a step, without waiting for the host."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.engine.gpu_kernels.filters import limits_of
from outrider.engine.gpu_kernels.race import race_winners
from outrider.engine.sampler.edits import LogitEditor
from outrider.engine.sampler.filters import has_filters
from outrider.engine.sampler.philox import WORD, split_seed
from outrider.engine.sampler.sequence_sampling import Decision, SampleRows
from outrider.engine.transfer import upload

TABLE_WORDS = 8
"""Number of words per row in a decision table; see `TritonDecider.table`."""


def _bits(numbers: Sequence[float]) -> np.ndarray:
    """Returns the bits of each number as float32: [n] int32."""
    return np.asarray(numbers, dtype=np.float32).view(np.int32)


class TritonDecider:
    """Decides by kernels that read each logit once. Filters read it two more times, or four times in rows that keep
    many tokens.
    """

    def __init__(self, editor: LogitEditor) -> None:
        self._editor = editor

    @torch.inference_mode()
    def decide(self, logits: Tensor, rows: Sequence[SampleRows]) -> Tensor:
        decisions = [decision for part in rows for decision in part.decisions()]
        values = self._editor.edit(logits, decisions)
        table = upload(self.table(decisions), logits.device)
        is_filtered = any(has_filters(each.params) for each in decisions if not each.params.is_greedy)
        return race_winners(values, table, limits_of(values, table) if is_filtered else None)

    def table(self, decisions: Sequence[Decision]) -> npt.NDArray[np.int64]:
        """Returns the kernels' parameters for these rows: [TABLE_WORDS, num_rows].

        The words are position, sample, low and high word of the seed; temperature (0: greedy) and log of min_p as the
        bits of a float32; top_k (0: none); top_p as the bits of a float64.
        """
        words = np.empty((TABLE_WORDS, len(decisions)), dtype=np.int64)
        for row, decision in enumerate(decisions):
            key, params = decision.key, decision.params
            words[:4, row] = (key.position & WORD, key.sample, *split_seed(key.seed))
            words[6, row] = params.top_k if params.top_k < self._editor.vocabulary.num_ids else 0
        params_of = [decision.params for decision in decisions]
        words[4] = _bits([0.0 if each.is_greedy else each.temperature for each in params_of])
        words[5] = _bits([math.log(each.min_p) if each.min_p > 0.0 else -math.inf for each in params_of])
        words[7] = np.asarray([each.top_p for each in params_of], dtype=np.float64).view(np.int64)
        return words

    @torch.inference_mode()
    def race(self, logits: Tensor, table: Tensor, winners: Tensor) -> None:
        """Runs races on rows that need no edits. Each race decides one token per row, from which the winners of
        earlier races are excluded. This may be captured in a CUDA graph, since it takes nothing from the host. Modifies
        the logits.

        Args:
            logits: [num_rows, vocab_size] float32.
            table: [TABLE_WORDS, num_rows] int64.
            winners: [num_races, num_rows] int64, the output.
        """
        values = self._editor.edit(logits, ())
        for number, token_ids in enumerate(winners.unbind(0)):
            if number:
                values.scatter_(1, winners[number - 1][:, None], -math.inf)
            race_winners(values, table, limits_of(values, table), token_ids)
