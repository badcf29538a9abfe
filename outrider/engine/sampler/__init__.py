"""Chooses tokens from logits: the contract's SamplingParams, by the coupled race (Gumbel-max) of the design."""

from __future__ import annotations

from outrider.engine.sampler.sampler import Sampler
from outrider.engine.sampler.sequence_sampling import SampledRows, SampleRows, SequenceSampling

__all__ = ["SampleRows", "SampledRows", "Sampler", "SequenceSampling"]
