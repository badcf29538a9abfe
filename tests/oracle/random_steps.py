"""Random steps of a sampler: parameters, histories, drafts and logits of every shape."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from outrider.engine.sampler import SampleRows
from outrider.request import Constraint, ConstraintKind, SamplingParams
from tests.oracle.sampler import OracleSampler
from tests.support.random_masks import RandomMasks
from tests.support.sampler_kinds import SamplerKind, SamplerOfKind

NUM_STEPS = {1: 20, 2: 20, 63: 30, 64: 30, 65: 30, 300: 40, 1000: 40, 5000: 40, 49_152: 4, 151_936: 2}
"""Number of random steps by size of the vocabulary. Only a full run has all of them; others have a quarter."""


def ranks(noise):
    """Returns the logarithms of 1, 2, …, len(noise)."""
    return np.log(np.arange(1, len(noise) + 1))


ROW_OF = {
    "flat": lambda noise, _: noise * 0.01,
    "equal": lambda noise, _: noise * 0,
    "normal": lambda noise, _: noise * 2.5,
    "zipf": lambda noise, rng: rng.permutation(-1.3 * ranks(noise)) + noise * 0.3,
    "peaked": lambda noise, rng: rng.permutation(-8 * ranks(noise)),
    "certain": lambda noise, _: np.where(np.arange(len(noise)) == len(noise) // 3, 500.0, noise),
    "ties": lambda noise, _: np.round(noise * 2) / 2,
    "bfloat16": lambda noise, _: noise * 4,
    "banned": lambda noise, _: np.where(noise > 0.5, -np.inf, noise * 3),
    "one left": lambda noise, _: np.where(np.arange(len(noise)) == len(noise) - 1, -30.0, -np.inf),
    "nothing left": lambda noise, _: noise - np.inf,
    "nan": lambda noise, _: np.where(noise > 3, np.nan, noise),
    "huge": lambda noise, _: noise * 1e38,
    "infinite": lambda noise, _: np.where(noise > 2.5, np.inf, noise),
}
"""Functions by the name of a shape. They make a row [vocab_size] from normal noise [vocab_size] and a generator."""

SHAPES = list(ROW_OF)


def logits_of(shape, vocab_size, rng):
    """Returns one row: [vocab_size] float32."""
    with np.errstate(over="ignore"):
        row = ROW_OF[shape](rng.standard_normal(vocab_size), rng).astype(np.float32)
    return (row.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32) if shape == "bfloat16" else row


def random_params(rng, vocab_size, **fixed):
    """Makes random parameters. `fixed`: settings that are not random."""
    choices = {
        "temperature": [0.0, 0.3, 0.7, 1.0, 1.0, 1.5, 20.0, 1e30],
        "top_p": [1.0, 1.0, 1.0, 1e-6, 0.1, 0.5, 0.9, 0.95, 0.999],
        "top_k": [0, 0, 0, 1, 2, 20, 100, 1000, 30_000],
        "min_p": [0.0, 0.0, 0.0, 1e-30, 0.01, 0.1, 1.0],
        "repetition_penalty": [1.0, 1.0, 1.0, 0.7, 1.3],
        "frequency_penalty": [0.0, 0.0, -1.9, 0.3, 1.1],
        "presence_penalty": [0.0, 0.0, -1.1, 0.7],
        "min_tokens": [0, 0, 3, 12],
    }
    constraint = Constraint(ConstraintKind.REGEX, str(rng.integers(99))) if rng.random() < 0.3 else None
    settings = {name: values[rng.integers(len(values))] for name, values in choices.items()}
    biased = sorted({int(token_id) for token_id in rng.integers(0, vocab_size + 2, rng.choice([0, 0, 4]))})
    biases = [-100.0, 5.0, 3e38, -3e38]
    settings["logit_bias"] = tuple((token_id, biases[rng.integers(len(biases))]) for token_id in biased)
    return SamplingParams(
        seed=int(rng.integers(2**63)) * 2 + 1, max_tokens=99, **{**settings, "constraint": constraint, **fixed}
    )


def some_ids(rng, limit, most):
    return rng.integers(0, limit, rng.integers(0, most + 1)).tolist()


def random_known(rng, vocab_size):
    """Makes a mask of known ids, sometimes with padding at the end and holes. At least one id is known."""
    known = np.ones(vocab_size, dtype=np.bool_)
    if rng.random() < 0.5:
        known[vocab_size - int(rng.integers(0, vocab_size // 3 + 1)) :] = False
    if rng.random() < 0.5:
        known[rng.integers(0, vocab_size, 3)] = False
    known[rng.integers(vocab_size)] = True
    return known


class Pair:
    """The same samples in samplers of the given kinds, by default a torch sampler, and last in the oracle."""

    def __init__(self, vocab_size, known, *kinds, device="cpu"):
        self.vocab_size, masks = vocab_size, RandomMasks(vocab_size)
        kinds = kinds or (SamplerKind(partial(torch.as_tensor, device=device)),)
        options = {"vocab_size": vocab_size, "known_token_ids": known, "constraints": masks}
        self.samplers = [
            *(SamplerOfKind(kind, device=device, **options) for kind in kinds),
            OracleSampler(**options),
        ]

    def start(self, params, *, committed, **options):
        states = [sampler.start(params, **options) for sampler in self.samplers]
        for sampler, state in zip(self.samplers, states, strict=True):
            for token_id in committed:
                sampler.commit(state, [token_id])
        return states

    def decide(self, logits, parts):
        """Returns each sampler's decisions. `parts`: (states, position, draft ids, assumed ids)."""
        return [
            sampler.sample(logits, [SampleRows(states[i], *rest) for states, *rest in parts]).token_ids
            for i, sampler in enumerate(self.samplers)
        ]

    def check_random_step(self, rng, *, num_sequences, shapes=SHAPES):
        """Checks that all samplers decide the same ids for a random step, and that the logits stay unchanged."""
        logits, parts = random_step(rng, self, self.vocab_size, num_sequences, shapes)
        before = logits.copy()
        *found, expected = self.decide(logits, parts)
        assert found == [expected] * len(found)
        assert np.array_equal(logits.view(np.int32), before.view(np.int32))


def random_step(rng, pair, vocab_size, num_sequences, shapes=SHAPES):
    """Makes sequences with random parameters, histories and drafts, and their logits."""
    parts, rows = [], []
    for _ in range(num_sequences):
        states = pair.start(
            random_params(rng, vocab_size),
            committed=some_ids(rng, vocab_size + 2, 80),
            sample=int(rng.integers(64)),
            prompt_token_ids=some_ids(rng, vocab_size + 2, 200),
            generated_token_ids=some_ids(rng, vocab_size, 80),
            stop_token_ids=some_ids(rng, vocab_size + 2, 3),
        )
        draft, assumed = some_ids(rng, min(vocab_size + 2, 40), 4), some_ids(rng, min(vocab_size + 2, 20), 3)
        parts.append((states, int(rng.integers(2**20)), tuple(draft), tuple(assumed)))
        rows += [logits_of(shapes[rng.integers(len(shapes))], vocab_size, rng) for _ in range(len(draft) + 1)]
    return np.stack(rows), parts
