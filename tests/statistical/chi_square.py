"""Reference distributions in float64, and the distance of drawn tokens from them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

SMALL, LARGE = 100, 151_665  # vocabulary sizes; neither is a multiple of 64

# Exact draws exceed this in one of ten thousand runs; the negative controls exceed it by far.
PASS = 3.7


def small_logits() -> Floats:
    return np.random.default_rng(0).standard_normal(SMALL) * 1.5


def large_logits() -> Floats:
    rng = np.random.default_rng(1)
    logits = rng.permutation(-1.05 * np.log(np.arange(1, LARGE + 1))) + rng.standard_normal(LARGE) * 0.5
    logits[-1] = logits.max() - 0.5  # likely, so that an error in the last, partial block shows
    return logits


def probabilities(logits: Floats, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Floats:
    """Returns the probabilities of the filtered distribution, in float64, by sorting."""
    values = logits.astype(np.float32).astype(np.float64) / temperature
    probs = np.exp(values - values.max())
    order = np.lexsort((np.arange(len(probs)), -probs))
    kept = order[: top_k or None]
    mass_before = np.cumsum(probs[kept]) - probs[kept]
    kept = kept[mass_before < top_p * probs[kept].sum()] if top_p < 1 else kept
    filtered = np.zeros(len(probs))
    filtered[kept] = probs[kept]
    return filtered / filtered.sum()


def chi_square_z(drawn: npt.NDArray[np.int64], probs: Floats, *, num_bins: int = 60) -> float:
    """Returns by how many standard deviations chi-square exceeds its mean for exact draws (Wilson-Hilferty)."""
    # The most likely tokens have bins of their own; the others, by id, share bins of about equal mass.
    order = np.argsort(-probs, kind="stable")
    bins = np.empty(len(probs), dtype=np.int64)
    num_alone = min(len(probs), num_bins // 2)
    bins[order[:num_alone]] = np.arange(num_alone)
    rest = np.sort(order[num_alone:])
    if len(rest):
        mass = np.cumsum(probs[rest])
        share = (mass / mass[-1] * (num_bins // 2 - 1e-9)).astype(np.int64) if mass[-1] > 0 else 0
        bins[rest] = num_alone + share
    return _z(np.bincount(bins[drawn], minlength=num_bins), np.bincount(bins, weights=probs, minlength=num_bins))


def pairs_z(drawn: npt.NDArray[np.int64], probs: Floats) -> float:
    """Tests independence: like chi_square_z, but for pairs of neighbouring positions and a few classes of tokens."""
    classes = np.minimum((np.cumsum(probs) * 6).astype(np.int64), 5)
    share = np.bincount(classes, weights=probs, minlength=6)
    pairs = classes[drawn[:-1:2]] * 6 + classes[drawn[1::2]]
    return _z(np.bincount(pairs, minlength=36), np.outer(share, share).ravel())


def worst_z(drawn: npt.NDArray[np.int64], probs: Floats) -> float:
    """Returns the larger of chi_square_z and pairs_z for streams of tokens [num_streams, num_tokens]."""
    return max(chi_square_z(drawn.ravel(), probs), pairs_z(drawn.ravel(), probs))


def _z(counts: npt.NDArray[np.int64], share: Floats) -> float:
    if counts[share == 0].any():
        return np.inf  # an impossible token was drawn
    counts, share = counts[share > 0], share[share > 0]
    expected = share * counts.sum()
    freedom = len(share) - 1
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / np.sqrt(2 / (9 * freedom))
