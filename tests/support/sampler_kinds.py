"""Samplers that differ in the code that decides and in the library of their arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from outrider.engine.arrays import Array
from outrider.engine.cpu_kernels.kernels import CpuKernels
from outrider.engine.sampler import Sampler
from outrider.engine.sampler.native_decider import NativeDecider


class SamplerKind(NamedTuple):
    """How a sampler computes."""

    array: Callable[[Any], Array]  # converts an array of either library to the sampler's
    kernels: CpuKernels | None = None  # None if the library decides


TORCH, NUMPY = SamplerKind(torch.as_tensor), SamplerKind(np.asarray)


class SamplerOfKind(Sampler):
    """A sampler that takes logits of either library."""

    def __init__(self, kind: SamplerKind, **options: Any) -> None:
        super().__init__(kernels=kind.kernels, **options)
        self.array = kind.array

    def decide(self, logits, rows):
        return super().decide(self.array(logits), rows)

    def with_logprobs(self, logits, rows, token_ids):
        return super().with_logprobs(self.array(logits), rows, token_ids)

    def distribution(self, logits, rows):
        return super().distribution(self.array(logits), rows)


def as_taken_by(sampler: Sampler, logits: Array) -> Array:
    """Returns logits of either library as arrays of this sampler's library."""
    if isinstance(sampler, SamplerOfKind):
        return sampler.array(logits)
    return np.asarray(logits) if isinstance(sampler.decider, NativeDecider) else logits
