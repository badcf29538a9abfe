"""Chooses tokens from logits by the contract's SamplingParams, with a race (Gumbel-max) that draft and target share."""

from __future__ import annotations

from outrider.engine.sampler.sampler import Sampler
from outrider.engine.sampler.sequence_sampling import SampledRows, SampleRows, SequenceSampling

__all__ = ["SampleRows", "SampledRows", "Sampler", "SequenceSampling"]
