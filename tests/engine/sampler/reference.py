"""An independent reference of random draws and filters, in float64, with full evaluation and sorting."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from outrider.engine.sampler.philox import philox4x32, split_seed
from outrider.request import SamplingParams


def params_of(**settings: object) -> SamplingParams:
    return SamplingParams(**{"seed": 5, "max_tokens": 100, **settings})


def reference_arrivals(seed: int, sample: int, position: int, vocab_size: int) -> npt.NDArray[np.float64]:
    """Returns the arrival times of all tokens in one decision: [vocab] float64."""
    key = split_seed(seed)

    def exponential(word: int) -> float:
        return -math.log1p(-min((float(np.float32(word)) + 0.5) * 2.0**-32, 1 - 2.0**-24))

    arrivals = np.empty(vocab_size)
    for token_id in range(vocab_size):
        block = token_id // 64
        w0, w1, _, _ = philox4x32((block, position, sample, 0), key)
        arrivals[token_id] = exponential(w0) / 64
        if 64 * block + (w1 & 63) != token_id:
            words = philox4x32((token_id // 4, position, sample, 1), key)
            arrivals[token_id] += exponential(words[token_id % 4])
    return arrivals


def reference_distribution(values: npt.NDArray[np.float32], params: SamplingParams) -> npt.NDArray[np.float64]:
    """Returns the log-probabilities of the distribution from which a token is drawn: [vocab].

    `values` are those after step 4 of the contract. This applies steps 5 and 6, for greedy rows with temperature 1.
    """
    if params.is_greedy:
        return _log_softmax(values.astype(np.float64))
    # The sampler divides in float32, so values that are equal in float32 are ties.
    values = (values / np.float32(params.temperature)).astype(np.float64)
    order = sorted(range(len(values)), key=lambda token_id: (-values[token_id], token_id))
    probs = np.exp(values - values.max())  # relative to the largest, so sums over equal tokens are exact
    if params.min_p > 0:
        order = [token_id for token_id in order if probs[token_id] >= params.min_p * probs.max() * (1 - 1e-9)]
    if params.top_k > 0:
        order = order[: params.top_k]
    if params.top_p < 1:
        total, before, kept = probs[order].sum(), 0.0, []
        for token_id in order:
            if before / total < params.top_p:
                kept.append(token_id)
            before += probs[token_id]
        order = kept
    filtered = np.full(len(values), -np.inf)
    filtered[order] = values[order]
    return _log_softmax(filtered)


def _log_softmax(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return values - values.max() - np.log(np.exp(values - values.max()).sum())
