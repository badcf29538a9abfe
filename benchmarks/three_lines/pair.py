"""A target and a drafter, as the three lines need them: simulated ones, or real models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from benchmarks.three_lines.speed_model import SpeedModel
    from decode_node.drafting.client import FeaturePlane
    from decode_node.drafting.gather import FeaturesOf
    from outrider.engine.engine import Engine
    from outrider.node import FeatureFormat
    from outrider.speculation.proposers.base import Proposer


class Pair(Protocol):
    """Makes the parts of each line; lines share nothing but the models."""

    @property
    def description(self) -> str:
        """For people: what is run."""

    @property
    def num_speculative_tokens(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def vocabulary_fingerprint(self) -> str:
        """Empty: any drafter will do."""

    @property
    def max_model_len(self) -> int: ...

    @property
    def draft_cpus(self) -> Sequence[int]:
        """Processors of what is across the network; empty: it may be on the target's."""

    @property
    def takes_trees(self) -> bool:
        """Whether drafts may have siblings, as a decode node takes them by default."""

    def engine(self) -> Engine:
        """Of the target, with a KV cache for one line."""

    @property
    def features(self) -> FeatureFormat | None:
        """That the target's side sends to the drafter; None: it needs none."""

    def feature_plane(self, engine: Engine) -> FeaturePlane | None:
        """Where they are read from."""

    def drafter_beside(self, engine: Engine, *, temperature: float) -> tuple[Proposer, FeaturesOf | None]:
        """In the target's process: and what features it is fed with."""

    def drafter_arguments(self, *, temperature: float) -> Sequence[str]:
        """Of `python -m benchmarks.three_lines.drafter`: the same drafter as a process of its own."""

    def speed_model(self, measured: SpeedModel) -> SpeedModel:
        """By which lines are predicted: with times and acceptance as they were set, or as they were measured."""

    def prompts(self, number: int, num_sequences: int) -> list[list[int]]:
        """Of the round of that number; the warm-up has -1."""
