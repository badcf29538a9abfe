"""A GrammarCompiler whose constraints allow random tokens, which depend on the constraint and the generated tokens."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np


class RandomMasks:
    def __init__(self, vocab_size):
        self.vocab_size = vocab_size

    def warm_up(self):
        """Does nothing."""

    def prepare(self, constraint):
        """Returns at once, because nothing is compiled."""
        compiled = Future()
        compiled.set_result(None)
        return compiled

    def start(self, constraint, generated_token_ids=()):
        return _RandomConstraint(self.vocab_size, constraint.text, list(generated_token_ids))


class _RandomConstraint:
    failure = ""

    def __init__(self, vocab_size, text, generated):
        self._vocab_size, self._text, self._generated = vocab_size, text, generated

    def commit(self, token_ids):
        self._generated += token_ids

    def forced_tokens(self):
        return []

    def masks(self, assumed_token_ids, draft_token_ids):
        rows = []
        for end in range(len(draft_token_ids) + 1):
            path = (*self._generated, *assumed_token_ids, *draft_token_ids[:end])
            rng = np.random.default_rng([len(path), *map(ord, self._text), *path])
            bits = rng.random(-(-self._vocab_size // 32) * 32) < rng.choice([0.0, 0.01, 0.3, 0.9, 1.0])
            rows.append(np.packbits(bits, bitorder="little").view(np.int32))
        return np.stack(rows)
