"""Samplers over one vocabulary, whose ids are all known."""

from __future__ import annotations

import torch

from outrider.engine.cpu_kernels.kernels import CpuKernels
from outrider.engine.sampler import Sampler
from tests.statistical.chi_square import Floats


def sampler_of(logits: Floats, kernels: CpuKernels | None) -> Sampler:
    return Sampler(vocab_size=len(logits), known_token_ids=torch.ones(len(logits), dtype=torch.bool), kernels=kernels)
