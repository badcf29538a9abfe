"""A target and a drafter, simulated or real, from which the lines of a comparison are made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from benchmarks.three_lines.speed_model import SpeedModel
    from decode_node.drafting.feature_plane import FeaturePlane
    from decode_node.drafting.gather import FeaturesOf
    from outrider.engine.engine import Engine
    from outrider.node import FeatureFormat
    from outrider.speculation.proposers.base import Proposer


class Pair(Protocol):
    """Makes the parts of each line. Lines share nothing except the models."""

    @property
    def description(self) -> str:
        """A readable description of the target and the drafter."""

    @property
    def num_speculative_tokens(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def vocabulary_fingerprint(self) -> str:
        """The fingerprint of the target's vocabulary; empty if drafters of every vocabulary are accepted."""

    @property
    def max_model_len(self) -> int: ...

    @property
    def draft_cpus(self) -> Sequence[int]:
        """Processors of the remote drafter and its network; empty if they share the target's."""

    @property
    def takes_trees(self) -> bool:
        """Whether drafts may be trees, which is a decode node's default."""

    def engine(self) -> Engine:
        """Returns a new engine of the target, with a KV cache for one line."""

    @property
    def features(self) -> FeatureFormat | None:
        """The format of the features that the target sends to the drafter; None if the drafter needs none."""

    def feature_plane(self, engine: Engine) -> FeaturePlane | None:
        """Returns the plane that features are read from, or None if the drafter needs none."""

    def drafter_beside(self, engine: Engine, *, temperature: float) -> tuple[Proposer, FeaturesOf | None]:
        """Returns a drafter for the target's process, and a function that returns a sequence's features, if needed."""

    def drafter_arguments(self, *, temperature: float) -> Sequence[str]:
        """Returns arguments of `python -m benchmarks.three_lines.drafter`, which runs the same drafter in a process."""

    def speed_model(self, measured: SpeedModel) -> SpeedModel:
        """Returns the speed model for predictions: a simulation's fixed times and acceptance, or `measured`."""

    def prompts(self, number: int, num_sequences: int) -> list[list[int]]:
        """Returns the token ids of the prompts of round `number`. The warm-up is round -1."""
