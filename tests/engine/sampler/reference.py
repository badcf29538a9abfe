"""An independent reference of the contract's sampling: Python integers, float64, full evaluation, sorting."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from outrider.request import SamplingParams

_MASK = 0xFFFFFFFF


def reference_philox(counter: Sequence[int], key: Sequence[int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 in plain integers, written from the paper."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        first, second = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (second >> 32) ^ c1 ^ k0, second & _MASK, (first >> 32) ^ c3 ^ k1, first & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def reference_arrivals(seed: int, sample: int, position: int, vocab_size: int) -> npt.NDArray[np.float64]:
    """Every arrival of one decision: [vocab] float64."""
    key = (seed & _MASK, seed >> 32)

    def exponential(word: int) -> float:
        return -math.log1p(-min((float(np.float32(word)) + 0.5) * 2.0**-32, 1 - 2.0**-24))

    arrivals = np.empty(vocab_size)
    for token_id in range(vocab_size):
        block = token_id // 64
        w0, w1, _, _ = reference_philox((block, position, sample, 0), key)
        arrivals[token_id] = exponential(w0) / 64
        if 64 * block + (w1 & 63) != token_id:
            words = reference_philox((token_id // 4, position, sample, 1), key)
            arrivals[token_id] += exponential(words[token_id % 4])
    return arrivals


def reference_distribution(
    logits: npt.NDArray[np.float32],
    params: SamplingParams,
    *,
    prompt_token_ids: Sequence[int] = (),
    generated_token_ids: Sequence[int] = (),
    stop_token_ids: Sequence[int] = (),
    known: npt.NDArray[np.bool_] | None = None,
) -> npt.NDArray[np.float64]:
    """Log-probabilities of what a token is drawn from, by the contract's steps 1 to 6: [vocab] float64.

    Greedy: after step 4, at temperature 1.
    """
    values = logits.astype(np.float64)
    if known is not None:
        values[~known] = -np.inf
    if len(generated_token_ids) < params.min_tokens:
        values[list(stop_token_ids)] = -np.inf
    for token_id, bias in params.logit_bias:
        values[token_id] += bias
    for token_id in set(prompt_token_ids) | set(generated_token_ids):
        factor = params.repetition_penalty
        values[token_id] = values[token_id] / factor if values[token_id] > 0 else values[token_id] * factor
    for token_id in set(generated_token_ids):
        values[token_id] -= params.frequency_penalty * list(generated_token_ids).count(token_id)
        values[token_id] -= params.presence_penalty
    if params.is_greedy:
        return values - _log_sum_exp(values)
    # Ties are ties of float32 values, which the sampler divides in float32.
    values = (values.astype(np.float32) / np.float32(params.temperature)).astype(np.float64)
    order = sorted(range(len(values)), key=lambda token_id: (-values[token_id], token_id))
    probs = np.exp(values - values.max())  # relative to the largest: those of equal tokens add up exactly
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
    return filtered - _log_sum_exp(filtered)


def _log_sum_exp(values: npt.NDArray[np.float64]) -> float:
    return float(values.max() + np.log(np.exp(values - values.max()).sum()))


def coupled_reference(
    logits: npt.NDArray[np.float32], params: SamplingParams, *, sample: int, position: int, **context: Sequence[int]
) -> int:
    """The token of one position: the whole contract, one decision at a time."""
    logprobs = reference_distribution(logits, params, **context)
    if params.is_greedy:
        return int(np.argmax(logprobs))
    return int(np.argmax(logprobs - np.log(reference_arrivals(params.seed, sample, position, len(logits)))))
