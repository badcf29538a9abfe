"""The race by our Triton kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.engine.gpu_kernels.race import run_whole_race
from outrider.engine.sampler.arrivals import RaceKeys
from outrider.engine.sampler.logit_blocks import LogitBlocks


@dataclass(frozen=True, slots=True)
class WholeRace:
    """A `Race` that computes every arrival, so that none is left open."""

    keys: RaceKeys

    @classmethod
    def of(cls, keys: RaceKeys, _num_blocks: int) -> WholeRace:
        return cls(keys)

    def run(self, blocks: LogitBlocks, *, num_candidates: int, limits: Tensor | None) -> tuple[Tensor, Tensor]:
        winners = run_whole_race(blocks.values.flatten(1), self.keys.words, limits)
        return winners, torch.zeros_like(winners, dtype=torch.bool)

    def select(self, rows: Tensor) -> WholeRace:
        return WholeRace(self.keys.select(rows))
