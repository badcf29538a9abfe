"""Random quantised weights in the forms that checkpoint formats have."""

from __future__ import annotations

import numpy as np

from outrider.engine.cpu_kernels.grouped_weight import GroupedWeight, GroupFactors

FORMATS = {
    "Q8_0": (8, 32, 0, None),
    "Q5_1": (5, 32, 0, "minima"),
    "Q5_K": (5, 32, 256, "minima"),
    "Q6_K": (6, 16, 256, None),
    "IQ4_XS": (8, 32, 256, None),
    "Q4_0": (4, 32, 0, None),
    "Q4_1": (4, 32, 0, "minima"),
    "Q4_K": (4, 32, 256, "minima"),
    "AWQ": (4, 128, 0, "zeros"),
    "GPTQ": (4, 64, 0, None),
    "GPTQ-8": (8, 128, 0, None),
    "AWQ-32": (4, 32, 0, "zeros"),
}
"""Bits, group size, inputs of one unit (0: no steps), and what is subtracted."""


def random_weight(name: str, out_features: int, in_features: int, seed: int = 0) -> GroupedWeight:
    """Returns random codes, with their extremes, and random factors. in_features: a multiple of unit and group."""
    bits, group_size, unit_size, subtracted = FORMATS[name]
    random = np.random.default_rng(seed)
    num_groups = in_features // group_size

    def factors(low: float, high: float) -> GroupFactors:
        units = random.uniform(low, high, (out_features, in_features // (unit_size or group_size))).astype(np.float16)
        steps = random.integers(-32, 64, (out_features, num_groups), dtype=np.int8) if unit_size else None
        return GroupFactors(units, steps)

    lowest = -(2 ** (bits - 1)) if subtracted is None else 0
    codes = random.integers(lowest, lowest + 2**bits, (out_features, in_features)).astype(np.int8)
    scales = factors(-0.01, 0.02)
    minima = factors(-0.1, 0.1) if subtracted == "minima" else None
    if subtracted == "zeros":
        minima = GroupFactors(scales.units, random.integers(0, 2**bits, (out_features, num_groups), dtype=np.int8))
    return GroupedWeight(codes, group_size, scales, minima)
