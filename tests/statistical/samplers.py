"""Samplers with a vocabulary of known ids only, and with constraints that have one mask for all positions."""

from __future__ import annotations

import numpy as np

from outrider.constraints.compiler import ALL_ALLOWED
from outrider.engine.cpu_kernels.kernels import CpuKernels
from outrider.engine.sampler import Sampler
from tests.statistical.chi_square import Floats


def sampler_of(logits: Floats, kernels: CpuKernels | None) -> Sampler:
    return Sampler(
        vocab_size=len(logits),
        known_token_ids=np.ones(len(logits), dtype=np.bool_),
        kernels=kernels,
        constraints=ChosenIds(len(logits)),
    )


class ChosenIds:
    """A stand-in for GrammarCompiler. A constraint's options are the ids that it allows, at every position."""

    def __init__(self, vocab_size):
        self._vocab_size = vocab_size

    def start(self, constraint, generated_token_ids=()):
        return _Chosen(self._vocab_size, frozenset(map(int, constraint.options)))


class _Chosen:
    failure = ""

    def __init__(self, vocab_size, ids):
        self._ids = ids
        bits = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
        bits[list(ids)] = 1
        self._words = np.packbits(bits, bitorder="little").view(np.int32)

    def commit(self, token_ids):
        self.failure = self.failure or ("" if self._ids.issuperset(token_ids) else "not allowed")

    def forced_tokens(self):
        return []

    def masks(self, assumed_token_ids, draft_token_ids):
        """Returns masks like a grammar's. Those after a forbidden token are never used, so they may be anything."""
        num_allowed = 0
        while num_allowed < len(draft_token_ids) and draft_token_ids[num_allowed] in self._ids:
            num_allowed += 1
        masks = np.full((len(draft_token_ids) + 1, len(self._words)), ALL_ALLOWED, dtype=np.int32)
        if self._ids.issuperset(assumed_token_ids):
            masks[: num_allowed + 1] = self._words
        return masks
